"""Gradients on gloo ranks: equal to redistributing each by itself, in few collectives."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fused_comm import GradReducer
from testkit import CommLog, loss_with_grad, run_ranks

pytestmark = pytest.mark.ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SHAPES = [(5, 3), (7,), (1,), (4, 6), (3, 2, 2), (2,)]


def backward_with(params, grads):
    sum(
        loss_with_grad(p, g) for p, g in zip(params, grads, strict=True) if g is not None
    ).backward()


def make_params(mesh, placements, shapes=SHAPES, dtype=torch.float32):
    return [
        torch.nn.Parameter(distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, placements))
        for shape in shapes
    ]


def make_grads(params, source, seed=0, dtype=None):
    """A gradient for each, of other values on each rank: sums that round."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    grads = []
    for param in params:
        whole = [R if isinstance(s, Partial) else s for s in source]
        like = distribute_tensor(torch.zeros(param.shape), param.device_mesh, whole)
        local = torch.randn(like.to_local().shape, generator=generator).to(dtype or param.dtype)
        meta = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        grads.append(DTensor.from_local(local, param.device_mesh, source, **meta))
    return grads


def redistributed(grads, target):
    return [grad.redistribute(placements=target).to_local() for grad in grads]


def locals_of(params):
    return [None if p.grad is None else p.grad.to_local() for p in params]


def equal(actual, expected):
    return [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)]


ONE_AXIS = [((P,), (R,)), ((P,), (S0,)), ((Partial("avg"),), (R,)), ((Partial("avg"),), (S0,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("source", "target"), ONE_AXIS)
def test_two_ranks_have_the_bits_of_redistribution(source, target, dtype):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = make_params(mesh, target, dtype=dtype)
        reducer = GradReducer(params, bucket_mb=100 / 2**20)
        results = []
        for step in range(3):
            grads = make_grads(params, source, step)
            backward_with(params, grads)
            reducer.finish()
            results += equal(locals_of(params), redistributed(grads, target))
            results += [p.grad.placements == target and p.grad.shape == p.shape for p in params]
            for param in params:
                param.grad = None
        return all(results), len(reducer.report().buckets) > 1

    assert run_ranks(check, 2) == [(True, True)] * 2


TWO_AXES = {
    "both reduced": ((P, P), (R, R)),
    "first only": ((P, R), (R, R)),
    "beside a shard": ((P, S1), (R, S1)),
    "hsdp": ((P, P), (R, S0)),
    "hsdp, mirrored": ((P, P), (S0, R)),
    "both scattered": ((P, P), (S0, S1)),
    "same dim": ((S0, P), (S0, S0)),
}


@pytest.mark.parametrize("fuse_axes", [True, False])
@pytest.mark.parametrize("case", TWO_AXES)
def test_four_ranks_agree_with_redistribution(case, fuse_axes):
    source, target = TWO_AXES[case]
    shapes = [(8, 4), (6, 5), (3, 2), (5, 7, 2)]

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        params = make_params(mesh, target, shapes)
        reducer = GradReducer(params, fuse_axes=fuse_axes)
        results = []
        for step in range(2):
            grads = make_grads(params, source, step)
            backward_with(params, grads)
            reducer.finish()
            for actual, expected in zip(
                locals_of(params), redistributed(grads, target), strict=True
            ):
                results.append(actual.shape == expected.shape)
                results.append(torch.allclose(actual, expected, rtol=1e-6, atol=1e-6))
            for param in params:
                param.grad = None
        return all(results)

    assert run_ranks(check, 4) == [True] * 4


def test_collectives_are_buckets_times_sets_of_axes():
    """Gradients of sequence-parallel norms and of data-parallel weights: two sets of axes."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norms = make_params(mesh, (R, R))
        weights = make_params(mesh, (R, S0), [(8, 3)] * 6)
        params = [p for pair in zip(norms, weights, strict=True) for p in pair]
        counts = {}
        for fuse in (True, False):
            reducer = GradReducer(params, fuse_axes=fuse)
            for _ in range(2):
                for param in params:
                    param.grad = None
                grads = make_grads(norms, (P, P)), make_grads(weights, (P, S0))
                with CommLog() as log:
                    backward_with(params, [g for pair in zip(*grads, strict=True) for g in pair])
                    reducer.finish()
            counts[fuse] = log.counts()
            reducer.remove()
        return counts

    assert run_ranks(check, 4) == [{True: {"all_reduce": 2}, False: {"all_reduce": 3}}] * 4


def test_buckets_are_sent_during_backward():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = make_params(mesh, (R,), [(64,)] * 4)
        reducer = GradReducer(params, bucket_mb=260 / 2**20)
        sent = []
        for step in range(2):
            grads = make_grads(params, (P,), step)
            total = torch.zeros((), requires_grad=True)
            for param, grad in zip(params, grads, strict=True):
                total = total + loss_with_grad(param, grad)
                total.register_hook(lambda _: sent.append(len(reducer._step.in_flight)))
            total.backward()
            sent.append(len(reducer._step.in_flight))
            reducer.finish()
        return sent

    # The first step plans; in the second each bucket is sent before the next gradient is computed.
    first, second = [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]
    assert run_ranks(check, 2) == [first + second] * 2


@pytest.mark.parametrize("options", [{}, {"op": "avg"}], ids=["default", "avg"])
def test_plain_tensors_are_averaged_as_ddp_does_it(options):
    def check():
        torch.manual_seed(0)
        actual, ddp = (
            torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
            for _ in range(2)
        )
        ddp.load_state_dict(actual.state_dict())
        ddp = torch.nn.parallel.DistributedDataParallel(ddp)
        reducer = GradReducer(actual.named_parameters(), group=dist.group.WORLD, **options)
        results = []
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 5)
            actual.zero_grad()
            ddp.zero_grad()
            actual(x).square().sum().backward()
            reducer.finish()
            ddp(x).square().sum().backward()
            for one, other in zip(actual.parameters(), ddp.parameters(), strict=True):
                results.append(torch.equal(one.grad, other.grad))
        return all(results)

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.parametrize("rows", [8, 7, 2])
def test_strided_shards_are_scattered_from_local_shards(rows):
    """As FSDP2 places parameters beside tensor parallelism."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        (whole,) = make_params(mesh, (R, S0), [(rows, 3)])
        strided = (_StridedShard(0, split_factor=2), S0)
        param = torch.nn.Parameter(whole.detach().redistribute(placements=strided))
        reducer = GradReducer([param])
        (grad,) = make_grads([whole], (P, S0))
        backward_with([param], [grad])
        with CommLog() as log:
            reducer.finish()
        expected = grad.redistribute(placements=(R, S0)).redistribute(placements=strided)
        same = torch.equal(param.grad.to_local(), expected.to_local())
        return same, param.grad.placements == strided, log.counts()["reduce_scatter"]

    assert run_ranks(check, 4) == [(True, True, 1)] * 4


def test_strided_shards_of_another_split_factor_are_refused():
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        placements = (_StridedShard(0, split_factor=4), S0)
        local = torch.zeros(2, 3)
        param = torch.nn.Parameter(
            DTensor.from_local(
                local, mesh, placements, run_check=False, shape=(8, 3), stride=(3, 1)
            )
        )
        (whole,) = make_params(mesh, (R, S0), [(8, 3)])
        reducer = GradReducer([param])
        backward_with([param], make_grads([whole], (P, S0)))
        with pytest.raises(ValueError, match="are no chunks of the local sum"):
            reducer.finish()

    run_ranks(check, 4)


@pytest.mark.parametrize("axes", [(P, R), (P, P)])
def test_reduce_dtype_is_used_on_every_axis(axes):
    """pytorch#190626: halves summed as halves lose what sums in fp32 keep."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        (param,) = make_params(mesh, (R, R), [(64,)], torch.bfloat16)
        reducer = GradReducer([param], reduce_dtype=torch.float32)
        (grad,) = make_grads([param], axes)
        backward_with([param], [grad])
        with CommLog() as log:
            reducer.finish()
        wide = DTensor.from_local(grad.to_local().float(), mesh, axes, run_check=False)
        (expected,) = redistributed([wide], (R, R))
        sums = {call.dtype for call in log.calls if call.input_bytes > 64}
        return param.grad.dtype, torch.equal(param.grad.to_local(), expected.bfloat16()), sums

    results = run_ranks(check, 4)
    assert results == [(torch.bfloat16, True, {"float32"})] * 4


def test_means_of_halves_do_not_overflow():
    """Four times 30000 is infinite in fp16; so the gradients are divided by two before the sum."""

    def check():
        mesh = init_device_mesh("cpu", (4,))
        (param,) = make_params(mesh, (R,), [(8,)], torch.float16)
        reducer = GradReducer([param], op="avg")
        grad = DTensor.from_local(torch.full((8,), 30000.0).half(), mesh, (P,), run_check=False)
        backward_with([param], [grad])
        reducer.finish()
        return param.grad.to_local().tolist()

    assert run_ranks(check, 4) == [[30000.0] * 8] * 4
