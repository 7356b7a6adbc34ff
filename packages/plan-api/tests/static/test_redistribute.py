"""Local tensors are redistributed with the bits of `DTensor.redistribute`, and their gradients."""

from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import uninstall
from plan_api.lowering.ir import AxisMove, OpKind, SiteStep
from plan_api.runtime.local_redistribute import local_redistribution
from plan_api.static.redistribute import StaticRedistribution
from testkit import CommLog, fake_mesh, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
AVG, MAX, MIN = Partial("avg"), Partial("max"), Partial("min")
SHAPE = (4, 6)

MOVES = [
    *product((P, AVG, MAX, MIN), (R, S0, S1)),
    *product((S0, S1), (R,)),
    *product((R,), (S0, S1)),
    (S0, S1),
    (S1, S0),
]


def _local(placement, rank, size):
    """Returns a local tensor of this placement; replicated ones are the same on all ranks."""
    torch.manual_seed(3 if placement == R else 3 + rank)
    shape = [*SHAPE]
    if isinstance(placement, Shard):
        shape[placement.dim] //= size
    return torch.randn(shape)


def _redistribution(mesh, src, dst, grad_src=None, grad_dst=None, axis="x", is_input=False):
    moves = {axis: AxisMove(dst, src, grad_dst, grad_src)}
    return StaticRedistribution(
        SiteStep("<in>", 0, OpKind.REDIST, moves, (0,)), mesh, "layer.forward_pre", is_input
    )


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_redistributions_have_the_bits_and_collectives_of_dtensor(size):
    def check():
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
        found = {}
        for src, dst in MOVES:
            if size == 4 and S1 in (src, dst):
                continue  # 4 ranks do not divide 6
            local = _local(src, mesh.get_rank(), size)
            before = local.clone()
            with CommLog() as native_log:
                native = DTensor.from_local(local, mesh, [src], run_check=False).redistribute(
                    placements=[dst]
                )
            with CommLog() as actual_log:
                actual = local_redistribution(src, dst, mesh, 0, "x")(local)
            found[src, dst] = (
                torch.equal(actual, native._local_tensor),
                actual.stride() == native._local_tensor.stride(),
                # On gloo DTensor runs an all-gather in place of the all-to-all.
                (isinstance(src, Shard) and isinstance(dst, Shard))
                or [(one.op, one.wire_bytes) for one in actual_log.calls]
                == [(one.op, one.wire_bytes) for one in native_log.calls],
                torch.equal(local, before),
                # A shard has memory of its own: an operator may write to it.
                actual.untyped_storage().data_ptr() != local.untyped_storage().data_ptr(),
            )
        return found

    for found in run_ranks(check, size):
        wrong = {case: facts for case, facts in found.items() if not all(facts)}
        assert wrong == {}
        assert len(found) == (len(MOVES) if size == 2 else 10)


@pytest.mark.ranks
def test_gradients_have_the_bits_of_dtensor():
    """Replicated tensors are followed by equal or by different work on the ranks."""
    cases = [
        *((src, dst, dst) for src, dst in MOVES if isinstance(dst, Shard) and src != AVG),
        *((src, R, R) for src in (P, S0, S1)),
        *((src, R, P) for src in (P, R, S0, S1)),
    ]

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        found = {}
        for src, dst, grad in cases:
            local, grad_output = (
                _local(src, mesh.get_rank(), 2),
                _local(grad, mesh.get_rank() + 5, 2),
            )
            native = DTensor.from_local(local, mesh, [src], run_check=False).detach()
            native.requires_grad_()
            gradient = DTensor.from_local(grad_output, mesh, [grad], run_check=False)
            native.redistribute(placements=[dst]).backward(gradient)
            # Without a redistribution forward DTensor leaves the gradient Partial.
            expected = native.grad.redistribute(placements=[src if isinstance(src, Shard) else R])
            actual = local.clone().requires_grad_()
            _redistribution(mesh, src, dst, grad_src=grad)(actual).backward(grad_output)
            found[src, dst, grad] = torch.equal(actual.grad, expected._local_tensor)
        return found

    for found in run_ranks(check, 2):
        assert [case for case, same in found.items() if not same] == []
        assert len(found) == len(cases)


@pytest.mark.ranks
def test_replicate_to_partial_divides_and_its_gradient_stays_replicated():
    """As for a bias added to a Partial product; `DTensor.redistribute` refuses it."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        replicated = torch.randn(SHAPE, requires_grad=True)
        grad_output = torch.randn(SHAPE)
        partial = _redistribution(mesh, R, P)(replicated)
        partial.backward(grad_output)
        return torch.equal(partial, replicated / 2), torch.equal(replicated.grad, grad_output)

    assert run_ranks(check, 2) == [(True, True)] * 2


@pytest.mark.ranks
def test_the_gradient_of_an_average_is_divided_by_the_ranks():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        local = torch.full(SHAPE, 1.0 + mesh.get_rank(), requires_grad=True)
        mean = _redistribution(mesh, AVG, R)(local)
        mean.backward(torch.full(SHAPE, 3.0))
        scattered = torch.full(SHAPE, 1.0 + mesh.get_rank(), requires_grad=True)
        part = _redistribution(mesh, AVG, S0)(scattered)
        part.backward(torch.full((2, 6), 1.0 + mesh.get_rank()))
        rows = [0.5] * 2 + [1.0] * 2
        expected = torch.tensor(rows).unsqueeze(1).expand(SHAPE)
        return (
            bool((mean == 1.5).all()),
            bool((local.grad == 1.5).all()),
            bool((part == 1.5).all()),
            torch.equal(scattered.grad, expected),
        )

    assert run_ranks(check, 2) == [(True,) * 4] * 2


@pytest.mark.ranks
def test_several_axes_are_redistributed_in_the_order_of_dtensor():
    """Dims that both axes shard included; in another order a rank would get another shard."""
    cases = [
        ([S0, S0], [R, R]), ([R, R], [S0, S0]), ([S0, P], [R, S1]), ([S1, S0], [R, R]),
        ([P, S0], [S1, R]), ([P, P], [S0, S1]), ([P, P], [R, R]), ([P, P], [S0, S0]),
        ([S0, S0], [R, S0]), ([R, S0], [S0, S0]), ([S0, S0], [S1, S0]), ([S0, S0], [S1, S1]),
        ([S0, S1], [S1, S0]), ([S0, S0], [S0, R]), ([S0, S0], [S0, S1]), ([S1, S0], [S0, S0]),
        ([P, S0], [S0, S0]), ([S0, P], [S0, S0]),
    ]  # fmt: skip

    def check():
        uninstall()  # two of the ranks may come from a test that used dtensor-rules on them alone
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        wrong = []
        for src, dst in cases:
            # A replicated tensor is the same on the ranks along its axis.
            where = zip(mesh.get_coordinate(), src, strict=True)
            torch.manual_seed(sum((at + 1) * 7**n for n, (at, p) in enumerate(where) if p != R))
            shape = [4, 4]
            for one in src:
                if isinstance(one, Shard):
                    shape[one.dim] //= 2
            local = torch.randn(shape)
            moves = {
                axis: AxisMove(dst[at], src[at], grad_src=dst[at], grad_dst=R)
                for at, axis in enumerate("xy")
            }
            redistribution = StaticRedistribution(
                SiteStep("<in>", 0, OpKind.REDIST, moves, (0,)), mesh, "site"
            )
            native = DTensor.from_local(local, mesh, src, run_check=False)
            native = native.redistribute(placements=dst)._local_tensor
            if not torch.equal(redistribution(local), native):
                wrong.append((src, dst))
        return wrong

    assert run_ranks(check, 4) == [[]] * 4


@pytest.fixture
def axis():
    with fake_mesh((2,), ("x",)) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("src", "dst", "becomes"),
    [
        (P, R, (R, R)),
        (P, S0, (S0, R)),
        (R, S1, (S1, R)),
        (S0, S1, (S1, S0)),
        (R, P, (R, R)),
        (S0, S0, (R, R)),
    ],
    ids=str,
)
def test_default_placements_of_gradients(axis, src, dst, becomes):
    assert (
        _redistribution(axis, src, dst)._gradient_placements("x", AxisMove(dst, src), src)
        == becomes
    )


def test_a_step_that_redistributes_nothing_is_an_identity(axis):
    assert _redistribution(axis, R, R).is_identity
    assert _redistribution(axis, S0, S0).is_identity
    assert not _redistribution(axis, R, R, grad_src=P, grad_dst=R).is_identity
    assert not _redistribution(axis, R, S0).is_identity


@pytest.mark.parametrize(("src", "dst"), [(P, R), (S0, R), (S0, S1), (AVG, S0)], ids=str)
def test_nothing_is_sent_along_an_axis_of_one_rank(src, dst):
    with fake_mesh((2, 1), ("other", "x")) as mesh:
        assert _redistribution(mesh, src, dst, grad_src=P, grad_dst=R).is_identity


def test_a_gather_without_grad_src_is_refused(axis):
    message = r"layer.forward_pre:<in>:0, S\(0\) to R along 'x'.*placement of its gradient"
    with pytest.raises(ValueError, match=message):
        _redistribution(axis, S0, R)
    with pytest.raises(ValueError, match="add grad_src="):
        _redistribution(axis, R, R, grad_dst=S0)
    _redistribution(axis, S0, R, grad_src=R)


def test_inputs_of_the_model_are_replicated_and_other_tensors_need_a_src(axis):
    with pytest.raises(
        ValueError, match=r"placement along 'x'.*to S\(0\); add redistribute\(path, src, dst\)"
    ):
        _redistribution(axis, None, S0)
    assert _redistribution(axis, None, S0, is_input=True)(torch.ones(4, 1)).shape == (2, 1)


@pytest.mark.parametrize(
    ("src", "dst"), [(S0, P), (R, AVG), (R, MAX), (P, AVG), (Partial("product"), R)], ids=str
)
def test_redistributions_that_dtensor_refuses_or_rounds_otherwise_are_refused(axis, src, dst):
    with pytest.raises(ValueError, match=r"cannot redistribute .*use mode='eager'"):
        _redistribution(axis, src, dst, grad_src=R)


@pytest.mark.parametrize(("src", "dst"), [(R, S0), (P, S0), (S1, S0)], ids=str)
def test_uneven_shards_are_refused_with_site_and_shape(axis, src, dst):
    with pytest.raises(
        ValueError, match=r"layer.forward_pre:<in>:0: .* 2 ranks divide .*shape \(3, 2\)"
    ):
        _redistribution(axis, src, dst)(torch.ones(3, 2))


def test_a_dtensor_is_refused_with_its_site(axis):
    dtensor = DTensor.from_local(torch.ones(2, 2), axis, [S0])
    with pytest.raises(
        ValueError, match=r"layer.forward_pre:<in>:0: expected a local tensor.*got a DTensor"
    ):
        _redistribution(axis, R, S0)(dtensor)


def test_tensors_without_gradient_are_redistributed_without_autograd(axis):
    assert not _redistribution(axis, R, S0)(torch.ones(4, 2)).requires_grad
    with torch.no_grad():
        moved = _redistribution(axis, R, S0)(torch.ones(4, 2, requires_grad=True))
    assert moved.grad_fn is None
