"""Plain tensors for DCP: slices of them are the boxes of a shard, and checkpoints are the same."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ragged_shard import (
    InterleavedShard,
    RaggedShard,
    StridedRaggedShard,
    _compat,
    from_checkpointable,
    to_checkpointable,
)
from ragged_shard.dtensor import checkpointable
from testkit import assert_bitwise, each_rank, run_ranks

R = Replicate()
SHAPE = (12, 4, 2)
needs_protocol = pytest.mark.skipif(
    not _compat.has_checkpointable_tensors(), reason="torch < 2.14 has no CheckpointableTensor"
)


def value(offset=0):
    return torch.arange(96.0).reshape(SHAPE) + offset


def layouts(world_size):
    """Meshes and placements: full rows, partial rows, owners, chunks, several axes."""
    pad = (0,) * (world_size - 2)
    if world_size == 1:
        return [((1,), (RaggedShard((0,), (3,)),)), ((1,), (Shard(2),))]
    one_axis = [
        (RaggedShard((0,), (5, 7, *pad)),),
        (RaggedShard((0, 1), (*pad, 5, 43)),),
        (RaggedShard((0, 1, 2), (7, 89, *pad)),),
        (RaggedShard((0, 1, 2), (*pad, 90, 6)),),
        (RaggedShard.owned_by(world_size - 1, world_size),),
        (InterleavedShard(0, 3),),
        (InterleavedShard(2, 1),),
        (Shard(0),),
    ]
    found = [((world_size,), placements) for placements in one_axis]
    if world_size == 4:
        two_axes = [
            (StridedRaggedShard((0,), (1, 5), 2), Shard(0)),
            (StridedRaggedShard((0,), (1, 5), 2), InterleavedShard(0, 3)),
            (StridedRaggedShard((0, 1, 2), (7, 41), 2), InterleavedShard(0, 3)),
            (RaggedShard((0, 1, 2), (13, 35)), InterleavedShard(1, 2)),
            (R, RaggedShard((0, 1, 2), (5, 91))),
        ]
        found += [((2, 2), placements) for placements in two_axes]
    return found


@st.composite
def ragged_cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    bounds = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    units = (bounds[0], bounds[1] - bounds[0], math.prod(shape) - bounds[1])
    return shape, RaggedShard(range(len(shape)), units)


@settings(deadline=None)
@given(ragged_cases())
def test_slices_of_the_plain_tensor_are_the_boxes_of_the_shard(case):
    shape, placement = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    for _, mesh in each_rank((3,)):
        shard = distribute_tensor(full, mesh, [placement], src_data_rank=None)
        layout = checkpointable._layout_of(shard)
        plain = checkpointable._plain_tensor(shard, layout)
        covered = 0
        for start, offsets, sizes in zip(
            plain.global_offsets, plain.local_offsets, plain.local_sizes, strict=True
        ):
            part = plain[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            expected = full[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
            assert torch.equal(part, expected)
            covered += part.numel()
        assert covered == shard._local_tensor.numel()
        row = math.prod(shape[1:])
        assert plain.numel() - covered < 2 * row
        shares = plain.data_ptr() == shard._local_tensor.data_ptr()
        assert covered == 0 or shares == (not layout.is_copy)


def test_full_rows_and_chunks_are_not_copied():
    kinds = {
        RaggedShard((0,), (5, 7)): False,
        RaggedShard((0, 1, 2), (40, 56)): False,  # five rows, seven rows
        RaggedShard((0, 1, 2), (2, 94)): True,
        InterleavedShard(0, 3): False,
        InterleavedShard(1, 2): False,
    }
    for placement, copied in kinds.items():
        for rank, mesh in each_rank((2,)):
            shard = distribute_tensor(value(), mesh, [placement], src_data_rank=None)
            is_copy = checkpointable._layout_of(shard).is_copy
            assert is_copy == (copied and rank == 1), placement  # rank 0 has a row of two elements


def full_state(world_size):
    state = {}
    for index, (mesh_shape, placements) in enumerate(layouts(world_size)):
        mesh = init_device_mesh("cpu", mesh_shape)
        state[f"{index}"] = distribute_tensor(value(index), mesh, placements)
    return {"tensors": state, "list": [state["0"] * 2, 3], "step": 7}


def save(path, way):
    state = full_state(dist.get_world_size())
    if way == "attributes":
        plain = to_checkpointable(state)
        dtensors = [t for t in plain["tensors"].values() if isinstance(t, DTensor)]
        assert all(type(p) is Shard for tensor in dtensors for p in tensor.placements)
        assert len(dtensors) == 1
        state = plain
    dcp.save(state, checkpoint_id=path)


def load(path, way, saved_world_size):
    world_size = dist.get_world_size()
    for mesh_shape, placements in layouts(world_size):
        mesh = init_device_mesh("cpu", mesh_shape)
        zeros = {
            name: distribute_tensor(torch.zeros(SHAPE), mesh, placements)
            for name in map(str, range(len(layouts(saved_world_size))))
        }
        other = distribute_tensor(torch.zeros(SHAPE), mesh, placements)
        state = {"tensors": zeros, "list": [other, 0], "step": 0}
        locals_before = {name: t._local_tensor.data_ptr() for name, t in zeros.items()}
        if way == "attributes":
            plain = to_checkpointable(state)
            dcp.load(plain, checkpoint_id=path)
            restored = from_checkpointable(plain, state)
            assert restored["tensors"]["0"] is zeros["0"]
        else:
            dcp.load(state, checkpoint_id=path)
            restored = state
        assert (restored["step"], restored["list"][1]) == (7, 3)
        assert_bitwise(restored["list"][0].full_tensor(), value() * 2, f"list as {placements}")
        for name, tensor in restored["tensors"].items():
            assert tensor.placements == placements
            assert tensor._local_tensor.data_ptr() == locals_before[name]
            assert_bitwise(tensor.full_tensor(), value(int(name)), f"{name} as {placements}")


WAYS = ("attributes", "dtensor")


@pytest.mark.ranks
@needs_protocol
@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpoints_of_both_ways_load_in_both_ways_on_1_2_and_4_ranks(tmp_path, saved, ranks):
    run_ranks(save, ranks, tmp_path, saved)
    for loaded in WAYS:
        for world_size in (1, 2, 4):
            run_ranks(load, world_size, tmp_path, loaded, ranks)


def without_patched_methods(path):
    """The methods that `install` replaces raise: DCP must not call them."""
    state = full_state(dist.get_world_size())
    del state["tensors"]["7"]  # of torch's placements
    plain = to_checkpointable(state)

    def refuse(*args):
        raise AssertionError("DCP has called a method of DTensor")

    names = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
    natives = {name: getattr(DTensor, name) for name in names}
    for name in names:
        setattr(DTensor, name, refuse)
    try:
        dcp.save(plain, checkpoint_id=path)
        dcp.async_save(plain, checkpoint_id=path / "async").result()
        for checkpoint in (path, path / "async"):
            zeros = {name: torch.zeros_like(t) for name, t in state["tensors"].items()}
            zeros = to_checkpointable({"tensors": zeros, "list": state["list"]})
            dcp.load(zeros, checkpoint_id=checkpoint)
            for name, tensor in zeros["tensors"].items():
                expected = plain["tensors"][name]
                for offsets, sizes in zip(
                    expected.local_offsets, expected.local_sizes, strict=True
                ):
                    box = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
                    assert torch.equal(tensor[box], expected[box]), name
    finally:
        for name, native in natives.items():
            setattr(DTensor, name, native)


@pytest.mark.ranks
@needs_protocol
def test_dcp_saves_and_loads_without_methods_of_dtensor(tmp_path):
    run_ranks(without_patched_methods, 2, tmp_path)


def remaining_dtensors():
    state = full_state(2)["tensors"]
    plain = to_checkpointable(state, partial_rows="dtensor")
    kinds = [isinstance(tensor, DTensor) for tensor in plain.values()]
    return [int(name) for name, is_dtensor in zip(plain, kinds, strict=True) if is_dtensor]


@pytest.mark.ranks
@needs_protocol
def test_partial_rows_stay_dtensors_if_asked():
    # 7 has a placement of torch's; of 3 the second rank has three rows of two elements.
    assert run_ranks(remaining_dtensors, 2) == [[1, 2, 3, 7], [1, 2, 7]]


def on_meta(path):
    state = full_state(2)
    dcp.save(to_checkpointable(state), checkpoint_id=path)
    meta = {
        name: DTensor(t._local_tensor.to("meta"), t._spec, requires_grad=False)
        for name, t in state["tensors"].items()
    }
    plain = to_checkpointable({"tensors": meta})
    with warnings.catch_warnings():  # of torch 2.15 about a function that it calls itself
        for message in (".*_get_pg_default_device", "Multiple backends are registered"):
            warnings.filterwarnings("ignore", message=message)
        dcp.load(plain, checkpoint_id=path)
    for name, tensor in from_checkpointable(plain, {"tensors": meta})["tensors"].items():
        assert tensor.placements == meta[name].placements
        assert_bitwise(tensor.full_tensor(), value(int(name)), name)


@pytest.mark.ranks
@needs_protocol
def test_dtensors_on_meta_are_allocated_by_loading(tmp_path):
    run_ranks(on_meta, 2, tmp_path)


def other_tensors(path):
    mesh = init_device_mesh("cpu", (2,))

    def make(scale):
        return {
            "scalar": distribute_tensor(
                torch.tensor(3.0 * scale), mesh, [RaggedShard.owned_by(1, 2)]
            ),
            "empty": distribute_tensor(torch.empty(0, 3), mesh, [RaggedShard((0,), (1, 1))]),
            "bf16": distribute_tensor(
                (value() * scale).bfloat16(), mesh, [RaggedShard((0, 1), (5, 43))]
            ),
        }

    dcp.save(to_checkpointable(make(1)), checkpoint_id=path)
    zeros = make(0)
    plain = to_checkpointable(zeros)
    dcp.load(plain, checkpoint_id=path)
    found = from_checkpointable(plain, zeros)
    assert found["scalar"].full_tensor() == 3.0
    assert_bitwise(found["bf16"].full_tensor(), value().bfloat16(), "bf16")


@pytest.mark.ranks
def test_scalars_empty_tensors_and_bf16(tmp_path):
    run_ranks(other_tensors, 2, tmp_path)


@pytest.mark.skipif(_compat.has_checkpointable_tensors(), reason="torch >= 2.14 has the protocol")
def test_dtensors_stay_before_torch_2_14():
    for _, mesh in each_rank((2,)):
        placements = [RaggedShard((0,), (5, 7))]
        state = {"a": distribute_tensor(value(), mesh, placements, src_data_rank=None)}
        plain = to_checkpointable(state)
        assert plain["a"] is state["a"]
        assert from_checkpointable(plain, state)["a"] is state["a"]


def test_a_state_dict_of_other_placements_is_refused():
    for _, mesh in each_rank((2,)):
        placements = (RaggedShard((0,), (5, 7)), RaggedShard((0,), (7, 5)))
        one, other = (
            distribute_tensor(value(), mesh, [placement], src_data_rank=None)
            for placement in placements
        )
        plain = checkpointable._plain_tensor(one, checkpointable._layout_of(one))
        for wrong in (plain, torch.ones(3), 7):
            with pytest.raises(
                ValueError, match=r"for 'model.a' what to_checkpointable makes of a"
            ):
                from_checkpointable({"model": {"a": wrong}}, {"model": {"a": other}})


def test_an_unknown_choice_for_partial_rows_is_refused():
    with pytest.raises(ValueError, match="partial_rows='copy' or 'dtensor', got 'move'"):
        to_checkpointable({}, partial_rows="move")
