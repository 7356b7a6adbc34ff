"""Placements that fit a tensor on a mesh, and those that are refused, on every rank alike."""

import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.geometry.validation import check_contiguous, check_fit, check_placements
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
        ((ROWS,), "1 placements for a mesh of 2 axes"),
        ((ROWS, R, R), "3 placements for a mesh of 2 axes"),
        ((ROWS, ROWS), "axes [0, 1] are both ragged; a tensor has at most one ragged axis"),
        (
            (ROWS, OWNED),
            "axes [0, 1] are both ragged; a tensor has at most one ragged axis",
        ),
        (
            (RaggedShard((0,), (1, 1, 2)), R),
            "local_units has 3 entries for a mesh axis of 2 ranks; give one per rank",
        ),
        (
            (RaggedShard((0, 1, 2), (1, 1)), R),
            "dims (0, 1, 2) do not exist in a tensor of shape (12, 6)",
        ),
        (
            (RaggedShard((0,), (2, 3)), R),
            "5 units do not divide the 12 elements of dims (0,) of shape (12, 6)",
        ),
        (
            (StridedRaggedShard((0,), (5, 7), 2), S0),
            "12 units do not divide the 6 elements of dims (0,) of shape (6, 6)",
        ),
        (
            (RaggedShard((0, 1), (35, 37)), S1),
            "72 units do not divide the 36 elements of dims (0, 1) of shape (12, 3)",
        ),
        (
            (StridedRaggedShard((0,), (1, 2), 2), S1),
            "the axes after it cut dim 0 into 1 pieces, so split_factor must be 1",
        ),
        (
            (StridedRaggedShard((0,), (1, 2), 3), S0),
            "the axes after it cut dim 0 into 2 pieces, so split_factor must be 2",
        ),
        (
            (S0, StridedRaggedShard((0,), (1, 2), 2)),
            "the axes after it cut dim 0 into 1 pieces, so split_factor must be 1",
        ),
        ((Shard(2), ROWS), "dim 2 does not exist in a tensor of shape (12, 6)"),
        ((Unknown(), ROWS), "is no placement that is known here"),
        ((InterleavedShard(2, 1), R), "dim 2 does not exist in a tensor of shape (12, 6)"),
        ((InterleavedShard(0, 5), R), "dim 0 of size 12 is not made of 5 equal chunks"),
        ((InterleavedShard(0, 2), S0), "an interleaved dim can be on one axis only"),
        (
            (_StridedShard(0, split_factor=2), InterleavedShard(0, 2)),
            "an interleaved dim can be on one axis only",
        ),
        (
            (InterleavedShard(0, 2), InterleavedShard(0, 3)),
            "an interleaved dim can be on one axis only",
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
        with refused("this rank is not in the mesh [0, 1]"):
            check_placements((12, 6), mesh, (ROWS,))


def test_units_are_asked_of_every_ranks_base():
    """5 rows on two ranks are 3 and 2: two units fit the second rank only, and both ranks raise."""
    placements = (StridedRaggedShard((0,), (1, 1), 2), S0)
    for rank in range(4):
        with fake_mesh((2, 2), rank=rank) as mesh:
            with refused("2 units do not divide the 3 elements"):
                distribute_tensor(torch.ones(5, 3), mesh, placements)
            with refused("2 units do not divide the 9 elements"):
                check_placements((5, 3), mesh, (StridedRaggedShard((0, 1), (1, 1), 2), S0))


def test_a_mesh_need_not_exist_and_may_be_large():
    check_fit((2**20, 8), (128, 4096), (RaggedShard((0, 1), (1,) * 128), Shard(0)))
    with refused("127 units do not divide"):
        check_fit((2**20, 8), (127, 4096), (RaggedShard((0, 1), (1,) * 127), Shard(0)))


def test_dims_of_stock_placements_may_count_from_the_end():
    with fake_mesh((2, 2)) as mesh:
        placed = distribute_tensor(torch.ones(6, 4), mesh, (ROWS, Shard(-1)))
        assert placed.placements == (ROWS, S1)
        assert placed.to_local().shape == (2, 2)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 3), (1, 4)), ((4, 3), (6, 1)), ((2, 2, 2), (4, 1, 2)), ((4,), (2,))],
)
def test_a_ragged_tensor_must_be_contiguous(shape, stride):
    with refused(f"{ROWS!r}: the tensor of shape {shape} has strides {stride}"):
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
