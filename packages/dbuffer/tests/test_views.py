"""Where tensors are in a buffer: addresses, shapes and placements, without communication."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from dbuffer import DBuffer
from dbuffer.views import contiguous_stride, ragged_shard
from ragged_shard import RaggedShard
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import each_rank, fake_mesh

S0, R = Shard(0), Replicate()
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def layouts(draw, world_size):
    """Tensors of any shape, empty ones and scalars too, in any blocks, aligned or not."""
    specs = []
    for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=6))):
        numel = math.prod(shape)
        block = draw(st.integers(1, max(1, numel)))
        specs.append(TensorSpec(f"t{i}", numel, block, draw(st.sampled_from([shape, None]))))
    alignment = draw(st.sampled_from([1, 2, 3, 8]))
    return plan_layout(specs, world_size, alignment=alignment, align_starts=draw(st.booleans()))


def numbered(layout):
    """The whole buffer with its places as content."""
    return torch.arange(layout.buffer_size, dtype=torch.float32)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_views_and_shards_lie_where_the_layout_says(data):
    world_size = data.draw(st.integers(1, 4))
    layout = data.draw(layouts(world_size))
    parts = [[] for _ in layout.specs]
    for rank, mesh in each_rank((world_size,)):
        full = DBuffer(layout, mesh, [R], torch.float32)
        small = DBuffer(layout, mesh, [S0], torch.float32)
        room = DBuffer(layout, mesh, [S0], torch.float32, full=True)
        begin = rank * layout.shard_size
        full.local.copy_(numbered(layout))
        room.view(0)  # before anything is gathered
        for buffer in (small, room):
            buffer.local.copy_(numbered(layout)[begin : begin + layout.shard_size])
        for i, spec in enumerate(layout.specs):
            start = layout.starts[i]
            view = full.view(i)
            assert view.shape == (spec.shape if spec.shape is not None else (spec.numel,))
            assert view.flatten().tolist() == list(range(start, start + spec.numel))
            assert small.shard(i).shape == ragged_shard(layout, i).local_shape(view.shape, rank)
            assert torch.equal(small.shard(i), room.shard(i))
            assert torch.equal(small.shard(i), full.shard(i))
            parts[i] += small.shard(i).flatten().tolist()
    for i, spec in enumerate(layout.specs):
        assert parts[i] == list(range(layout.starts[i], layout.starts[i] + spec.numel))


@pytest.mark.parametrize(
    ("shape", "block", "wanted"),
    [
        pytest.param((4, 6), 6, RaggedShard((0,), (2, 2)), id="rows"),
        pytest.param((4, 6), 12, RaggedShard((0,), (1, 1)), id="pairs of rows"),
        pytest.param((4, 6), 3, RaggedShard((0, 1), (4, 4)), id="half rows"),
        pytest.param((4, 6), 24, RaggedShard((), (1, 0)), id="whole"),
        pytest.param((4, 2, 3), 3, RaggedShard((0, 1), (4, 4)), id="inner rows"),
        pytest.param((), 1, RaggedShard((), (1, 0)), id="scalar"),
        pytest.param((3, 0), 1, RaggedShard((), (1, 0)), id="empty"),
        pytest.param((5,), 2, RaggedShard((0,), (2, 3)), id="short last block"),
    ],
)
def test_a_tensor_is_placed_by_as_few_dims_as_its_units_allow(shape, block, wanted):
    layout = plan_layout([TensorSpec("t", math.prod(shape), block, shape)], 2)
    assert ragged_shard(layout, 0) == wanted


def test_objects_and_addresses_are_the_same_always():
    layout = plan_layout([TensorSpec("a", 12, 3, (4, 3)), TensorSpec("b", 5)], 2, alignment=4)
    with fake_mesh((2,), rank=1) as mesh:
        buffer = DBuffer(layout, mesh, [S0], torch.float32, full=True)
        view, shard, dtensor = buffer.view("a"), buffer.shard("a"), buffer.dtensor("a")
        address = buffer.view(0).data_ptr()
        assert address == buffer.memory.bytes.data_ptr() + 4 * layout.starts[0]
        assert dtensor.to_local().data_ptr() == shard.data_ptr()
        buffer.all_gather_()
        assert buffer.dtensor("a") is not dtensor  # it is placed otherwise now
        assert buffer.dtensor("a").to_local().data_ptr() == address
        buffer.set_placements([S0])
        assert buffer.view("a") is view
        assert buffer.shard(0) is shard
        assert buffer.dtensor(0) is dtensor
        assert view.data_ptr() == address


def test_all_lie_in_one_storage_and_padding_is_zero():
    layout = plan_layout([TensorSpec("a", 3, 3), TensorSpec("b", 3, 3)], 2, alignment=8)
    with fake_mesh((2,)) as mesh:
        buffer = DBuffer(layout, mesh, [R], torch.float64)
        tensors = [buffer.view(0), buffer.view(1), buffer.shard(0), buffer.local]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
        assert buffer.nbytes == buffer.memory.bytes.untyped_storage().nbytes() == 16 * 8
        for gap in layout.padding_intervals():
            assert not buffer.local[gap.start : gap.stop].any()


def test_a_buffer_may_be_on_meta():
    layout = plan_layout([TensorSpec("a", 12, 3, (4, 3))], 2)
    with fake_mesh((2,)) as mesh:
        buffer = DBuffer(layout, mesh, [S0], torch.float32, "meta")
        assert buffer.dtensor(0).to_local().is_meta
        assert buffer.dtensor(0).shape == (4, 3)
        buffer.release()
        buffer.acquire()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 3), (3, 0, 2)])
def test_strides_are_as_torch_counts_them(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_placement_is_made_again_as_uninstalling_unregisters_those_that_exist():
    layout = plan_layout([TensorSpec("weight", 64, 1, shape=(8, 8))], 2)
    assert ragged_shard(layout, 0) == ragged_shard(layout, 0)
    assert ragged_shard(layout, 0) is not ragged_shard(layout, 0)
