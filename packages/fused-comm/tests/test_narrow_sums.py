"""Terms that are sent in bfloat16 or float8: bits, bytes, and what a block shares."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import GradReducer
from fused_comm.narrow_sums import (
    BLOCK,
    NARROW_DTYPES,
    _narrowed,
    _widened,
    narrow_all_reduce,
    narrow_reduce_scatter,
)
from testkit import CommLog, fake_mesh, loss_with_grad, run_ranks

R, P, S0 = Replicate(), Partial(), Shard(0)
BF16, E4M3, E5M2 = NARROW_DTYPES
# Largest difference from a number, relative to the largest number of its block.
ROUNDING = {BF16: 2**-8, E4M3: 2**-4, E5M2: 2**-3}


@pytest.fixture
def mesh_of_four():
    with fake_mesh((4,)) as mesh:
        yield mesh


def rounded(rows, dtype):
    """What rows are after they have been sent."""
    return _widened(_narrowed(rows, dtype), rows.shape[1], dtype, torch.float32)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
@pytest.mark.parametrize("row", [1, 127, 128, 300])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_numbers_are_rounded_relative_to_the_largest_of_their_block(dtype, row, scale):
    rows = draw(3, row) * scale
    rows[1] = 0
    found = rounded(rows, dtype)
    padded = torch.nn.functional.pad(rows, (0, -row % BLOCK)).view(3, -1, BLOCK)
    largest = padded.abs().amax(-1, True).expand_as(padded).reshape(3, -1)[:, :row]
    assert ((found - rows).abs() <= largest * ROUNDING[dtype]).all()
    assert torch.equal(found[1], rows[1])


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_powers_of_two_are_exact(dtype):
    rows = torch.tensor([[1.0] * 130, [-(2.0**100)] * 130, [2.0**-100] * 130])
    assert torch.equal(rounded(rows, dtype), rows)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(dtype, bad):
    rows = draw(1, 3 * BLOCK)
    rows[0, BLOCK + 5] = bad
    finite = rounded(rows, dtype).isfinite()[0]
    assert not finite[BLOCK : 2 * BLOCK].any()
    assert finite[:BLOCK].all()
    assert finite[2 * BLOCK :].all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float64_beyond_the_range_of_scales_is_nan(dtype):
    rows = torch.full((1, 4), 1e200, dtype=torch.float64)
    assert _widened(_narrowed(rows, dtype), 4, dtype, torch.float64).isnan().all()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_of_rounded_terms_in_the_order_of_the_ranks(ranks):
    """A rank's own term is rounded too, so that sums do not depend on where their part is."""

    def check():
        group, same = dist.group.WORLD, []
        for dtype in NARROW_DTYPES:
            for row in (7, 200):
                terms = [draw(ranks, row, seed=rank) for rank in range(ranks)]
                expected = sum(rounded(term, dtype) for term in terms)
                own = terms[dist.get_rank()].flatten()
                output = torch.empty(row)
                narrow_reduce_scatter(output, own, dtype, group).wait()
                same.append(torch.equal(output, expected[dist.get_rank()]))

                everything = torch.stack(terms).flatten(1)[:, : ranks * row - 1]  # uneven parts
                part = -(-everything.shape[1] // ranks)
                part = part if dtype == BF16 else -(-part // BLOCK) * BLOCK
                rows = torch.nn.functional.pad(
                    everything, (0, ranks * part - everything.shape[1])
                ).view(ranks, ranks, part)
                sums = rounded(sum(rounded(term, dtype) for term in rows), dtype)
                tensor = everything[dist.get_rank()].clone()
                narrow_all_reduce(tensor, dtype, group).wait()
                same.append(torch.equal(tensor, sums.flatten()[: len(tensor)]))
        return same

    assert all(map(all, run_ranks(check, ranks)))


SHAPES = [(16, 32), (7,), (1,), (256,)]


def make_params(mesh, placements, shapes=SHAPES):
    return [
        torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
        for shape in shapes
    ]


def make_grads(params):
    """A gradient for each, Partial along all axes, of other values on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    grads = []
    for param in params:
        local = torch.randn(param.shape, generator=generator)
        partial = [P] * param.device_mesh.ndim
        grads.append(DTensor.from_local(local, param.device_mesh, partial, run_check=False))
    return grads


def backward_with(params, grads):
    terms = [loss_with_grad(*one) for one in zip(params, grads, strict=True) if one[1] is not None]
    sum(terms).backward()


def locals_of(params):
    return [param.grad.to_local() for param in params]


@pytest.mark.ranks
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("target", [(R,), (S0,)])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_a_reducer_sends_narrow_terms_of_each_gradient(dtype, target, zero_copy):
    """Gradients of very different sizes share no block, and steps repeat the bits."""

    def check():
        params = make_params(init_device_mesh("cpu", (2,)), target)
        reducer = GradReducer(params, send_dtype=dtype, zero_copy=zero_copy)
        steps, near, rounds = [], [], []
        for _ in range(3):
            grads = [grad * 10.0 ** (9 * at) for at, grad in enumerate(make_grads(params))]
            backward_with(params, grads)
            reducer.finish()
            steps.append([local.clone() for local in locals_of(params)])
            for found, grad in zip(steps[-1], grads, strict=True):
                exact = grad.redistribute(placements=target).to_local()
                within = 8 * max(exact.abs().flatten().tolist(), default=0) * ROUNDING[dtype]
                near.append(bool(((found - exact).abs() <= within).all()))
                rounds.append(not torch.equal(found, exact))
            for param in params:
                param.grad = None
        pairs = [pair for step in steps[1:] for pair in zip(steps[0], step, strict=True)]
        return all(torch.equal(*pair) for pair in pairs), all(near), any(rounds)

    assert run_ranks(check, 2) == [(True, True, True)] * 2


@pytest.mark.parametrize("target", [(R,), (S0,)])
@pytest.mark.parametrize(("dtype", "per_element"), [(BF16, 2), (E4M3, 1 + 1 / BLOCK)])
def test_bytes_are_those_of_narrow_numbers_and_scales(mesh_of_four, dtype, per_element, target):
    """Of gradients and flags: to three ranks of four, and as much again to return the sums."""
    params = make_params(mesh_of_four, target, [(1024, 128)])
    reducer = GradReducer(params, send_dtype=dtype)
    for _ in range(2):
        with CommLog() as log:
            backward_with(params, make_grads(params))
            reducer.finish()
        params[0].grad = None
    numel = reducer.report().buckets[0].nbytes / 4
    assert numel - 1024 * 128 <= 4 * BLOCK
    times = 2 if target == (R,) else 1
    expected = times * numel * 3 / 4 * per_element
    assert expected * 0.999 <= log.wire_bytes() <= expected + times * 4 * BLOCK * per_element
    assert reducer.report().collectives == len(log.calls) == times


@pytest.mark.ranks
def test_a_gradient_that_only_one_rank_has_arrives_beside_large_ones():
    """The flags that say so are in blocks of their own."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = make_params(mesh, (R,), [(3,), (300,)])
        reducer = GradReducer(params, send_dtype=E4M3)
        found = []
        for step in range(3):
            small, large = make_grads(params)
            has_small = step == 0 or dist.get_rank() == 0
            backward_with(params, [small if has_small else None, large * 1e20])
            reducer.finish()
            found.append(params[0].grad is not None and bool(params[0].grad.to_local().any()))
            for param in params:
                param.grad = None
        return found

    assert run_ranks(check, 2) == [[True] * 3] * 2


@pytest.mark.ranks
@pytest.mark.slow
def test_axes_have_dtypes_of_their_own():
    """Exact along one axis, rounded along the other; a sum of two collectives."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local"))
        params = make_params(mesh, (R, S0))
        reducer = GradReducer(params, send_dtype={"hosts": BF16})
        for _ in range(2):
            grads = make_grads(params)
            with CommLog() as log:
                backward_with(params, grads)
                reducer.finish()
            same = []
            for param, grad in zip(params, grads, strict=True):
                exact = grad.redistribute(placements=(P, S0)).to_local()
                terms = [torch.empty_like(exact) for _ in range(2)]
                dist.all_gather(terms, exact.contiguous(), group=mesh.get_group("hosts"))
                expected = sum(one.bfloat16().float() for one in terms).bfloat16().float()
                same.append(torch.equal(param.grad.to_local(), expected))
                param.grad = None
        return all(same), log.counts(), reducer.report().buckets[0].route

    for same, counts, route in run_ranks(check, 4):
        assert same
        assert counts == {"reduce_scatter": 1, "all_to_all": 1, "all_gather": 1}
        assert route == "reduce-scatter over 2, all-reduce over 2 in bfloat16, float32"


@pytest.mark.ranks
def test_ranks_that_send_other_dtypes_are_refused():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = make_params(mesh, (R,))
        with pytest.raises(ValueError, match=r"sent in torch.bfloat16 on rank 0"):
            GradReducer(params, send_dtype=BF16 if dist.get_rank() == 0 else None)
        return True

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.ranks
def test_plain_tensors_are_averaged_as_without():
    def check():
        torch.manual_seed(dist.get_rank())
        param = torch.nn.Parameter(torch.zeros(300))
        reducer = GradReducer([param], group=dist.group.WORLD, send_dtype=BF16)
        for _ in range(2):
            param.grad = None
            grad = torch.randn(300)
            (param * grad).sum().backward()
            reducer.finish()
        terms = [torch.empty(300) for _ in range(2)]
        dist.all_gather(terms, grad)
        expected = sum((one / 2).bfloat16().float() for one in terms).bfloat16().float()
        return torch.equal(param.grad, expected)

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, "bfloat16"])
def test_other_dtypes_are_refused(dtype):
    param = torch.nn.Parameter(torch.zeros(2))
    for given in (dtype, {"dp": dtype}):
        with pytest.raises(ValueError, match=r"send_dtype: expected one of torch.bfloat16, .*got"):
            GradReducer([param], send_dtype=given)
