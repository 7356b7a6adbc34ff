"""Collectives of buffers on real ranks, by each strategy, against naive sums of each tensor."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from dbuffer import DBuffer
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import CommLog, fake_mesh, run_ranks

pytestmark = pytest.mark.ranks

S0, R, SUM, AVG = Shard(0), Replicate(), Partial(), Partial("avg")
SHAPES = [(5, 3), (), (0, 4), (7,), (4, 4), (1, 3)]


def layout_of(world_size, shapes=SHAPES, blocks=None, alignment=4):
    blocks = blocks or [1] * len(shapes)
    specs = [
        TensorSpec(f"t{i}", torch.Size(shape).numel(), block, shape)
        for i, (shape, block) in enumerate(zip(shapes, blocks, strict=True))
    ]
    return plan_layout(specs, world_size, alignment=alignment)


def drawn(seed, shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def summed(parts):
    """In the order of ranks, each step rounded to the dtype."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def same_bits(layout, shapes, strategy, dtype, asynchronous):
    """Whether all collectives on one axis give what naive sums in the order of ranks give."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    parts = [drawn(seed, shapes, dtype) for seed in range(size)]
    sums = [summed([parts[r][i] for r in range(size)]) for i in range(len(shapes))]

    def run(collective):
        handle = collective(async_op=asynchronous)
        assert handle.done is not asynchronous
        handle.wait()
        handle.wait()  # again does nothing

    full = DBuffer(layout, mesh, [S0], dtype, full=True, strategy=strategy)
    full.copy_from(parts[0])
    run(full.all_gather_)
    good = [torch.equal(full.view(i), parts[0][i]) for i in range(len(shapes))]
    small = DBuffer(layout, mesh, [S0], dtype)
    small.copy_from(parts[1 % size])
    run(partial(full.all_gather_, small))  # whatever was in it, it is sharded as the source is
    good += [torch.equal(full.view(i), parts[1 % size][i]) for i in range(len(shapes))]
    for how in (SUM, AVG):
        wanted = sums if how is SUM else [total / size for total in sums]
        grad = DBuffer(layout, mesh, [how], dtype, strategy=strategy)
        grad.copy_from(parts[rank])
        run(grad.reduce_scatter_)
        for i, total in enumerate(wanted):
            part = layout.part(i, rank)
            mine = total.reshape(-1)[part.start : part.stop]
            good.append(torch.equal(grad.shard(i).reshape(-1), mine))
        run(grad.all_gather_)
        good += [torch.equal(grad.view(i), wanted[i]) for i in range(len(shapes))]
        grad.set_placements([how])
        grad.copy_from(parts[rank])
        run(grad.all_reduce_)
        good += [torch.equal(grad.view(i), wanted[i]) for i in range(len(shapes))]
    return all(good)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("strategy", ["exchange", "native"])
def test_both_strategies_have_the_same_bits_at_two_ranks(strategy, dtype, asynchronous):
    args = (layout_of(2), SHAPES, strategy, dtype, asynchronous)
    assert run_ranks(same_bits, 2, *args) == [True, True]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exchange_adds_in_the_order_of_ranks(dtype, size):
    args = (layout_of(size), SHAPES, "exchange", dtype, True)
    assert run_ranks(same_bits, size, *args) == [True] * size


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_layout_is_gathered_and_reduced_as_each_tensor_alone(data):
    size = data.draw(st.sampled_from([2, 4]))
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    blocks = [data.draw(st.integers(1, max(1, torch.Size(shape).numel()))) for shape in shapes]
    layout = layout_of(size, shapes, blocks, data.draw(st.sampled_from([1, 3, 8])))
    assert all(run_ranks(same_bits, size, layout, shapes, "exchange", torch.float32, False))


def hybrid(strategy):
    """A step of HSDP on 2 x 2: what was sent, and whether the shard is the mean of all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    layout, rank = layout_of(2), dist.get_rank()
    parts = [drawn(seed, SHAPES) for seed in range(4)]
    grad = DBuffer(layout, mesh, [AVG, AVG], torch.float32, strategy=strategy)
    grad.copy_from(parts[rank])
    with CommLog() as log:
        grad.reduce_scatter_()
        between = grad.placements
        grad.all_reduce_("dp")
    means = [
        ((parts[0][i] + parts[1][i]) / 2 + (parts[2][i] + parts[3][i]) / 2) / 2
        for i in range(len(SHAPES))
    ]
    good = [
        torch.equal(grad.dtensor(i).full_tensor(), means[i]) for i in range(len(SHAPES))
    ]  # by ragged_shard's own collectives
    calls = {op: log.bytes(op) for op in log.counts()}
    return good, str(between), str(grad.placements), log.counts(), calls, layout.shard_size * 4


@pytest.mark.parametrize("strategy", ["exchange", "native"])
def test_hybrid_sharding_reduces_only_the_shard_over_the_replicas(strategy):
    good, between, after, counts, sent, shard = run_ranks(hybrid, 4, strategy)[0]
    assert all(good)
    assert between == "(Partial(avg), Shard(dim=0))"
    assert after == "(Replicate(), Shard(dim=0))"
    if strategy == "native":
        assert counts == {"reduce_scatter": 1, "all_reduce": 1}
        assert sent == {"reduce_scatter": 2 * shard, "all_reduce": shard}
    else:  # its shard's row to the other rank; half of the shard, twice
        assert counts == {"send": 3, "recv": 3}
        assert sent == {"send": 2 * shard, "recv": 2 * shard}


def counted(strategy):
    mesh = init_device_mesh("cpu", (2,))
    layout = layout_of(2)
    full = DBuffer(layout, mesh, [S0], torch.float32, full=True, strategy=strategy)
    one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp"))
    single = DBuffer(layout_of(1), one, [R, SUM], torch.float32, strategy=strategy)
    empty = DBuffer(layout_of(2, [(0,)]), mesh, [SUM], torch.float32, strategy=strategy)
    with CommLog() as log:
        full.all_gather_()
        single.reduce_scatter_()  # nobody else on the axis
        empty.all_reduce_()  # nothing in the buffer
        single.all_gather_()
    return log.counts(), single.placements == (R, R), empty.placements == (R,)


def test_a_gather_is_one_collective_and_none_where_there_is_nothing_to_send():
    assert run_ranks(counted, 2, "native")[0] == ({"all_gather": 1}, True, True)
    for strategy in ("exchange", "auto"):  # gloo's own are slower
        assert run_ranks(counted, 2, strategy)[0] == ({"send": 1, "recv": 1}, True, True)


def allocated():
    """Bytes that torch allocated at the most during a gather and a reduce-scatter."""
    mesh = init_device_mesh("cpu", (2,))
    layout = layout_of(2, [(1000, 1000)])
    full = DBuffer(layout, mesh, [S0], torch.float32, full=True, strategy="exchange")
    grad = DBuffer(layout, mesh, [SUM], torch.float32, strategy="exchange")
    found = []
    for collective in (full.all_gather_, grad.reduce_scatter_):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            collective()
        events = profile.profiler.kineto_results.events()
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        found.append(sum(size for size in sizes if size > 0))
    return found, full.nbytes


def test_a_gather_allocates_nothing_and_a_reduction_one_shard():
    (gather, reduction), nbytes = run_ranks(allocated, 2)[0]
    assert gather == 0
    assert reduction == nbytes // 2


def two_in_flight():
    """Two buffers' collectives are under way at once, and waited for in the other order."""
    mesh = init_device_mesh("cpu", (2,))
    layout, rank = layout_of(2), dist.get_rank()
    buffers = []
    for seed in (0, 10):
        buffer = DBuffer(layout, mesh, [SUM], torch.float32)
        buffer.copy_from(drawn(seed + rank, SHAPES))
        buffers.append(buffer)
    handles = [buffer.reduce_scatter_(async_op=True) for buffer in buffers]
    for handle in reversed(handles):
        handle.wait()
    good = []
    for buffer, seed in zip(buffers, (0, 10), strict=True):
        buffer.all_gather_()
        pairs = zip(drawn(seed, SHAPES), drawn(seed + 1, SHAPES), strict=True)
        good += [torch.equal(buffer.view(i), a + b) for i, (a, b) in enumerate(pairs)]
    return all(good)


def test_several_buffers_may_be_in_flight():
    assert run_ranks(two_in_flight, 2) == [True, True]


def other_order(strategy):
    """A mesh whose ranks descend: shards go by the mesh, not by the group."""
    mesh = DeviceMesh("cpu", [1, 0])
    try:
        full = DBuffer(layout_of(2), mesh, [S0], torch.float32, full=True, strategy=strategy)
    except ValueError as error:
        return str(error)
    given = drawn(0, SHAPES)
    full.copy_from(given)
    full.all_gather_()
    good = [torch.equal(full.view(i), t) for i, t in enumerate(given)]
    return full.rank == 1 - dist.get_rank() and all(good)


def test_a_mesh_in_another_order_is_exchanged_rightly_or_refused():
    assert run_ranks(other_order, 2, "exchange") == [True, True]
    for answer in run_ranks(other_order, 2, "native"):
        assert answer is True or "use strategy='exchange'" in answer


def test_a_source_is_taken_over_where_nobody_else_is():
    with fake_mesh((1,)) as mesh:
        layout = layout_of(1)
        small = DBuffer(layout, mesh, [S0], torch.float32)
        small.copy_from(drawn(0, SHAPES, torch.float32))
        full = DBuffer(layout, mesh, [S0], torch.float32, full=True)
        full.zero_()
        full.all_gather_(small)
        for i, tensor in enumerate(drawn(0, SHAPES, torch.float32)):
            assert torch.equal(full.view(i), tensor)
