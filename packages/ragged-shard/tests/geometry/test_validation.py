"""Placements that fit a tensor on a mesh, and those that are refused, on every rank alike."""

import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.geometry.validation import (
    check_contiguous,
    check_fit,
    check_local,
    check_placements,
)
from testkit import fake_mesh

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
ROWS, OWNED = RaggedShard((0,), (1, 2)), RaggedShard.owned_by(1, 2)


class Unknown(Placement):
    """A placement of somebody else's."""

    def __init__(self):
        super().__init__()

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return isinstance(other, Unknown)

    def __str__(self):  # tests are named by it, alike in every process that collects them
        return "Unknown"


def refused(message):
    return pytest.raises(ValueError, match=re.escape(message))


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((ROWS,), "expected one for each of the 2 axes of mesh (2, 2), got 1"),
        ((ROWS, R, R), "expected one for each of the 2 axes of mesh (2, 2), got 3"),
        ((ROWS, ROWS), "expected at most one ragged axis, got [0, 1]"),
        (
            (ROWS, OWNED),
            "expected at most one ragged axis, got [0, 1]",
        ),
        (
            (RaggedShard((0,), (1, 1, 2)), R),
            "each of the 2 ranks of the mesh axis, got 3",
        ),
        (
            (RaggedShard((0, 1, 2), (1, 1)), R),
            "expected dims of the tensor, whose shape is (12, 6), got (0, 1, 2)",
        ),
        (
            (RaggedShard((0,), (2, 3)), R),
            "divides 12, the elements of dims (0,) of shape (12, 6), got 5",
        ),
        (
            (StridedRaggedShard((0,), (5, 7), 2), S0),
            "divides 6, the elements of dims (0,) of shape (6, 6), got 12",
        ),
        (
            (RaggedShard((0, 1), (35, 37)), S1),
            "divides 36, the elements of dims (0, 1) of shape (12, 3), got 72",
        ),
        (
            (StridedRaggedShard((0,), (1, 2), 2), S1),
            "expected split_factor=1, the number of shards of dim 0 on the axes after it",
        ),
        (
            (StridedRaggedShard((0,), (1, 2), 3), S0),
            "expected split_factor=2, the number of shards of dim 0 on the axes after it",
        ),
        (
            (S0, StridedRaggedShard((0,), (1, 2), 2)),
            "expected split_factor=1, the number of shards of dim 0 on the axes after it",
        ),
        ((Shard(2), ROWS), "expected a dim of the tensor, whose shape is (12, 6), got 2"),
        ((Unknown(), ROWS), "expected a placement of torch or ragged_shard, got an unknown one"),
        (
            (InterleavedShard(2, 1), R),
            "expected a dim of the tensor, whose shape is (12, 6), got 2",
        ),
        ((InterleavedShard(0, 5), R), "chunks that divides 12, the size of dim 0, got 5"),
        ((InterleavedShard(0, 2), S0), "expected an interleaved dim that no other axis shards"),
        (
            (_StridedShard(0, split_factor=2), InterleavedShard(0, 2)),
            "expected an interleaved dim that no other axis shards",
        ),
        (
            (InterleavedShard(0, 2), InterleavedShard(0, 3)),
            "expected an interleaved dim that no other axis shards",
        ),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_placements_that_do_not_fit_are_refused_on_every_rank(placements, message):
    for rank in range(4):
        with fake_mesh((2, 2), rank=rank) as mesh, refused(message):
            check_placements((12, 6), mesh, placements)


def test_a_rank_beside_the_mesh_places_nothing():
    with fake_mesh((4,), rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        with refused("expected a rank of the mesh [0, 1], got one outside of it"):
            check_placements((12, 6), mesh, (ROWS,))


def test_units_are_asked_of_every_ranks_base():
    """5 rows on two ranks are 3 and 2: two units fit the second rank only, and both ranks raise."""
    placements = (StridedRaggedShard((0,), (1, 1), 2), S0)
    for rank in range(4):
        with fake_mesh((2, 2), rank=rank) as mesh:
            with refused("a number of units that divides 3, the elements"):
                distribute_tensor(torch.ones(5, 3), mesh, placements)
            with refused("a number of units that divides 9, the elements"):
                check_placements((5, 3), mesh, (StridedRaggedShard((0, 1), (1, 1), 2), S0))


def test_a_mesh_need_not_exist_and_may_be_large():
    check_fit((2**20, 8), (128, 4096), (RaggedShard((0, 1), (1,) * 128), Shard(0)))
    with refused("divides 2048, the elements of dims (0, 1) of shape (256, 8), got 127"):
        check_fit((2**20, 8), (127, 4096), (RaggedShard((0, 1), (1,) * 127), Shard(0)))


def test_dims_of_native_placements_may_count_from_the_end():
    with fake_mesh((2, 2)) as mesh:
        placed = distribute_tensor(torch.ones(6, 4), mesh, (ROWS, Shard(-1)))
        assert placed.placements == (ROWS, S1)
        assert placed.to_local().shape == (2, 2)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 3), (1, 4)), ((4, 3), (6, 1)), ((2, 2, 2), (4, 1, 2)), ((4,), (2,))],
)
def test_a_ragged_tensor_must_be_contiguous(shape, stride):
    with refused(f"{ROWS!r}: expected a contiguous tensor, "):
        check_contiguous(shape, stride, (R, ROWS))


@pytest.mark.parametrize(
    ("shape", "stride", "placements"),
    [
        ((4, 3), (3, 1), (ROWS,)),
        ((1, 4), (9, 1), (ROWS,)),
        ((0, 4), (1, 7), (ROWS,)),
        ((), (), (OWNED,)),
        ((4, 3), (1, 4), (S0,)),
        ((4, 3), (1, 4), (InterleavedShard(0, 2),)),
    ],
    ids=["contiguous", "size-one", "empty", "scalar", "shard", "interleaved"],
)
def test_strides_that_change_nothing_are_let_pass(shape, stride, placements):
    check_contiguous(shape, stride, placements)


def test_the_check_of_an_operand_does_not_ask_its_mesh_again(monkeypatch):
    """A mesh computes its shape at each call; the step of an optimizer checks many operands."""
    asked = []
    compute = DeviceMesh.shape.fget
    with fake_mesh((2,)) as mesh:
        placed = distribute_tensor(torch.ones(6, 4), mesh, (ROWS,))
        check_local("mul", placed.to_local(), placed._spec)
        counting = property(lambda mesh: asked.append(mesh) or compute(mesh))
        monkeypatch.setattr(DeviceMesh, "shape", counting)
        check_local("mul", placed.to_local(), placed._spec)
        assert asked == []
        assert mesh.shape == (2,)
        assert asked == [mesh]  # it would have been seen
        monkeypatch.undo()
