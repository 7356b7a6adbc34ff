"""Bad input raises before any collective, with the expected value, the one got and the remedy."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dbuffer import DBuffer, Inner, MemoryPool, verify
from ragged_shard import InterleavedShard
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import CommLog, fake_mesh, run_ranks

S0, R, SUM = Shard(0), Replicate(), Partial()


def layout_of(world_size=2):
    return plan_layout(
        [TensorSpec("a", 12, 1, (4, 3)), TensorSpec("b", 5), TensorSpec("b", 2)], world_size
    )


@pytest.fixture
def mesh():
    with fake_mesh((2, 2), ("dp", "fsdp")) as found:
        yield found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"layout": "x"}, "layout .*Layout, got 'x'", id="layout"),
        pytest.param({"mesh": 3}, "mesh .*DeviceMesh, got 3", id="mesh"),
        pytest.param({"dtype": "float32"}, "dtype .*dtype, got 'float32'", id="dtype"),
        pytest.param({"layout": layout_of(3)}, "2 shards.*got 3 .*world_size=2", id="world"),
        pytest.param({"placements": [S0]}, "placement .*2 axes.*got 1", id="few"),
        pytest.param(
            {"placements": [R, Shard(1)]}, r"Shard\(0\).*axis 1.*got Shard\(dim=1\)", id="dim"
        ),
        pytest.param(
            {"placements": [R, Partial("max")]},
            r"Partial\('sum'\).*axis 1.*got Partial\(max\)",
            id="max",
        ),
        pytest.param({"placements": [S0, S0]}, r"axis .*got .*_flatten\(\)", id="two shards"),
        pytest.param({"shard_axis": "tp"}, "shard_axis .*0 to 1.*'fsdp'.*got 'tp'", id="axis"),
        pytest.param({"shard_axis": 2}, "shard_axis .*0 to 1.*got 2", id="axis number"),
        pytest.param({"strategy": "fast"}, "strategy .*'auto'.*got 'fast'", id="strategy"),
        pytest.param({"alignment": 0}, "alignment .*positive.*got 0", id="alignment"),
        pytest.param({"alignment": 128}, "64 .*got 128.*MemoryPool", id="large alignment"),
        pytest.param({"inner": {"c": None}}, "'c', got 0 among 'a', 'b', 'b'", id="inner"),
        pytest.param({"inner": {"b": None}}, "'b', got 2 among 'a', 'b', 'b'", id="ambiguous"),
    ],
)
def test_arguments_are_checked(mesh, changes, message):
    arguments = {"layout": layout_of(), "mesh": mesh, "placements": [R, S0], "dtype": torch.float32}
    with pytest.raises(ValueError, match=f"DBuffer: .*{message}"):
        DBuffer(**arguments | changes)


@pytest.mark.parametrize(
    ("placements", "shape", "message"),
    [
        (lambda: (R, R), (4, 3), r"\('tp',\), got \(Replicate\(\), Replicate\(\)\)"),
        (lambda: (Shard(1),), (4, 7), r"2 ranks, got .*\(4, 7\); pad dim 1 .* 2, or plan"),
        (lambda: (Shard(1),), (4, 8), r"local shape \(4, 4\) .*got \(4, 3\)"),
        (lambda: (InterleavedShard(1, 2),), (4, 6), "pad dim 1 .* 4, or plan"),
    ],
)
def test_inner_placements_are_checked(placements, shape, message):
    with fake_mesh((2, 2), ("fsdp", "tp")) as mesh:
        inner = {"a": Inner(mesh, placements(), shape)}
        with pytest.raises(ValueError, match=f"DBuffer: .*'a'.*{message}"):
            DBuffer(layout_of(), mesh["fsdp"], [S0], torch.float32, inner=inner)


def test_an_inner_mesh_has_named_axes():
    with fake_mesh((2, 2)) as mesh:
        inner = {"a": Inner(mesh, (), (4, 3))}
        with pytest.raises(ValueError, match=r"inner mesh of .*'a'.*named axes.*got \(\)"):
            DBuffer(layout_of(), mesh, [R, S0], torch.float32, inner=inner)


def test_a_rank_outside_the_mesh_is_told(mesh):
    other = torch.distributed.DeviceMesh("cpu", [2, 3])
    with pytest.raises(ValueError, match="rank of the mesh, got rank 0"):
        DBuffer(layout_of(), other, [S0], torch.float32)


def test_memory_that_is_given_is_checked(mesh):
    pool, arguments = MemoryPool("cpu"), (layout_of(), mesh, [R, R], torch.float32)
    with pytest.raises(ValueError, match="80 bytes on cpu, got 48 on cpu"):
        DBuffer(*arguments, memory=pool.take(40))
    with pytest.raises(ValueError, match="80 bytes on meta, got 80 on cpu"):
        DBuffer(*arguments, "meta", memory=pool.take(80))
    with pytest.raises(ValueError, match=r"pin_memory=False .*got True"):
        DBuffer(*arguments, memory=pool.take(80), pin_memory=True)
    odd = MemoryPool("cpu", alignment=1).take_many([1, 80])[1]
    with pytest.raises(ValueError, match=r"alignment=1 .*4 bytes, got 0x"):
        DBuffer(*arguments, memory=odd, alignment=1)
    assert not odd.allocated
    taken = pool.take(80)
    DBuffer(*arguments, memory=taken)
    with pytest.raises(RuntimeError, match="free block, got one of 80 bytes"):
        DBuffer(*arguments, memory=taken)


@pytest.mark.parametrize("key", [3, -1, np.int64(3), "c", 1.0])
def test_a_tensor_that_does_not_exist(mesh, key):
    buffer = DBuffer(layout_of(), mesh, [R, R], torch.float32)
    for way in (buffer.view, buffer.shard, buffer.dtensor):
        with pytest.raises(ValueError, match=rf"(0 to 2, got|named) {key!s}|named 'c'"):
            way(key)


USES = {
    "view": lambda buffer: buffer.view(0),
    "shard": lambda buffer: buffer.shard(0),
    "dtensor": lambda buffer: buffer.dtensor(0),
    "local": lambda buffer: buffer.local,
    "all_gather_": DBuffer.all_gather_,
    "reduce_scatter_": DBuffer.reduce_scatter_,
    "all_reduce_": lambda buffer: buffer.all_reduce_(1),
    "zero_": DBuffer.zero_,
    "scale_": lambda buffer: buffer.scale_(2.0),
    "add_": lambda buffer: buffer.add_(buffer),
    "copy_": lambda buffer: buffer.copy_(buffer),
    "copy_from": lambda buffer: buffer.copy_from([None] * 3),
    "add_from": lambda buffer: buffer.add_from([None] * 3),
    "set_placements": lambda buffer: buffer.set_placements([R, R]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_released_buffer_is_not_used(mesh, use):
    buffer = DBuffer(layout_of(), mesh, [R, SUM], torch.float32)
    buffer.release()
    with pytest.raises(RuntimeError, match=r"allocated .*got a released .*acquire\(\)"):
        use(buffer)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_buffer_in_flight_is_not_used(mesh, use):
    buffer = DBuffer(layout_of(), mesh, [R, SUM], torch.float32)
    handle = buffer.reduce_scatter_(async_op=True)
    if use in (USES["view"], USES["shard"]):  # these tell where, not what
        use(buffer)
    else:
        with pytest.raises(RuntimeError, match=r"collective in flight.*wait\(\)"):
            use(buffer)
    with pytest.raises(RuntimeError, match=r"release: .*collective in flight"):
        buffer.release()
    handle.wait()
    assert buffer.placements == (R, S0)
    buffer.zero_()  # it may be used again


@pytest.mark.parametrize(
    ("placements", "use", "message"),
    [
        ([R, R], USES["all_gather_"], r"Shard\(0\) on axis 'fsdp', got Replicate\(\)"),
        ([R, S0], USES["all_gather_"], "all 20 elements, got .* 10;.*full=True"),
        ([R, S0], USES["view"], "view: .*full=True"),
        ([R, S0], USES["set_placements"], "full=True"),
        ([R, S0], USES["reduce_scatter_"], r"Partial on axis 'fsdp', got Shard\(dim=0\)"),
        ([SUM, R], USES["all_reduce_"], r"Partial on axis 'fsdp', got Replicate\(\)"),
        ([SUM, SUM], DBuffer.all_reduce_, "one Partial axis, got 2 .*axis="),
        ([R, R], DBuffer.all_reduce_, "one Partial axis, got 0 .*axis="),
    ],
)
def test_a_collective_in_the_wrong_state_sends_nothing(placements, use, message):
    with fake_mesh((2, 2), ("dp", "fsdp")) as mesh:
        buffer = DBuffer(layout_of(), mesh, placements, torch.float32)
        with CommLog() as log, pytest.raises(RuntimeError, match=message):
            use(buffer)
        log.assert_counts({})
        assert buffer.placements == tuple(placements)


def test_tensors_that_come_in_are_checked(mesh):
    buffer = DBuffer(layout_of(), mesh, [R, R], torch.float32)
    placed = DTensor.from_local(torch.ones(4, 3), mesh, [R, R])
    for given, message in (
        ([torch.ones(4, 3)], "layout's 3, got 1"),
        ({"a": torch.ones(3, 4)}, r"'a'.*\(4, 3\), got \(3, 4\)"),
        ({"c": torch.ones(1)}, "'c', got 0"),
        ({"a": placed}, r"'a'.*got a DTensor.*to_local\(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.copy_from(given)
        with pytest.raises(ValueError, match=message):
            buffer.add_from(given)


def test_buffers_that_differ_are_not_added(mesh):
    buffer = DBuffer(layout_of(), mesh, [R, R], torch.float32)
    other = plan_layout([TensorSpec("a", 19)], 2)
    with pytest.raises(ValueError, match=r"layout, mesh and shard axis .*got DBuffer"):
        buffer.copy_(DBuffer(other, mesh, [R, R], torch.float32))
    with pytest.raises(ValueError, match=r"add_: .*Replicate\(\)\), got .*Partial"):
        buffer.add_(DBuffer(layout_of(), mesh, [R, SUM], torch.float32))
    shard = DBuffer(layout_of(), mesh, [R, S0], torch.float32)
    with pytest.raises(RuntimeError, match=r"copy_: .*full=True"):
        shard.copy_(buffer)


def disagreement(kind):
    """The error of each of four ranks; on rank 3 something differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    odd = torch.distributed.get_rank() == 3
    layout = layout_of()
    if odd and kind == "block":
        layout = plan_layout([TensorSpec("a", 12, 3, (4, 3)), *layout.specs[1:]], 2)
    if odd and kind == "name":
        layout = plan_layout([*layout.specs[:2], TensorSpec("z", 2)], 2)
    if odd and kind == "number":
        layout = plan_layout(layout.specs[:2], 2)
    dtype = torch.bfloat16 if odd and kind == "dtype" else torch.float32
    buffers = [DBuffer(layout_of(), mesh, [R, S0], torch.float32) for _ in range(2)]
    first = SUM if odd and kind == "placements" else R
    strategy = "native" if odd and kind == "strategy" else "auto"
    buffers.append(DBuffer(layout, mesh, [first, S0], dtype, strategy=strategy))
    options = ["", "", "odd" if odd and kind == "options" else "even"]
    try:
        with CommLog() as log:
            verify(buffers, options=options)
    except ValueError as error:
        return str(error)
    return log.counts()


DIFFERENCES = {
    "block": "block of 'a' of buffer 2: 1 elements on rank 0, and 3 elements on rank 3",
    "dtype": "dtype of 'a' of buffer 2: torch.float32 on rank 0, and torch.bfloat16 on rank 3",
    "name": "'b' of buffer 2 (number 2 of that name) is in a buffer on rank 0, and in none on rank "
    "3",
    "number": "'b' of buffer 2 (number 2 of that name) is in a buffer on rank 0, and in none on "
    "rank 3",
    "options": "options of buffer 2 ('a', 'b', 'b'): even on rank 0, and odd on rank 3",
    "placements": "plan of buffer 2 ('a', 'b', 'b'): 2 shards of 10 elements, (Replicate(), "
    "Shard(dim=0)), full=False, Exchange, Exchange on rank 0, and 2 shards of 10 elements, "
    "(Partial(sum), Shard(dim=0)), full=False, Exchange, Exchange on rank 3",
    "strategy": "plan of buffer 2 ('a', 'b', 'b'): 2 shards of 10 elements, (Replicate(), "
    "Shard(dim=0)), full=False, Exchange, Exchange on rank 0, and 2 shards of 10 elements, "
    "(Replicate(), Shard(dim=0)), full=False, Native, Native on rank 3",
}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_every_rank_is_told_where_ranks_differ(kind):
    answers = run_ranks(disagreement, 4, kind)
    assert len(set(answers)) == 1
    assert answers[0].startswith(f"verify: ranks differ: {DIFFERENCES[kind]}; shard the same")


@pytest.mark.ranks
def test_ranks_that_agree_send_two_numbers_for_each_axis():
    assert run_ranks(disagreement, 4, "none") == [{"all_reduce": 2}] * 4


def test_only_buffers_of_one_mesh_are_verified_at_once(mesh):
    here = DBuffer(layout_of(), mesh, [R, S0], torch.float32)
    there = DBuffer(layout_of(), mesh["fsdp"], [S0], torch.float32)
    with pytest.raises(ValueError, match="one mesh, got several"):
        verify([here, there])
    verify([])


def test_sources_of_a_gather(mesh):
    full = DBuffer(layout_of(), mesh, [R, S0], torch.float32, full=True)
    half = DBuffer(layout_of(), mesh, [R, S0], torch.float16)
    with pytest.raises(ValueError, match=r"torch.float32 on cpu, got torch.float16 on cpu"):
        full.all_gather_(half)
    with pytest.raises(ValueError, match=r"layout, mesh and shard axis .*got DBuffer"):
        full.all_gather_(DBuffer(layout_of(), mesh, [S0, R], torch.float32))
    whole = DBuffer(layout_of(), mesh, [R, R], torch.float32)
    with pytest.raises(RuntimeError, match=r"Shard\(0\) on axis 'fsdp', got Replicate"):
        full.all_gather_(whole)


def test_axes_and_places_are_any_integers(mesh):
    layout = plan_layout([TensorSpec("a", 12, 1, (4, 3)), TensorSpec("b", 6)], 2)
    buffer = DBuffer(layout, mesh, [R, S0], torch.float32, shard_axis=np.int64(-1))
    assert (buffer.shard_axis, type(buffer.shard_axis)) == (1, int)
    assert buffer.dtensor(np.int64(1)).shape == buffer.dtensor("b").shape == (6,)
    with pytest.raises(ValueError, match=r"shard_axis .*got 1.0"):
        DBuffer(layout, mesh, [R, S0], torch.float32, shard_axis=1.0)
