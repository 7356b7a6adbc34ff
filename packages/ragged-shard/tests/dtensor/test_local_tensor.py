"""torch's call for a rank's local shape and offset, against the tensors that it holds."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard, local_shape
from ragged_shard.geometry.stored_boxes import rank_boxes
from testkit import fake_mesh

SHAPE = (12, 6)
ROWS = RaggedShard((0,), (5, 0, 7))
BOXES = {
    "uneven rows": ((3,), [ROWS]),
    "fewer units than rows": ((3,), [RaggedShard((0,), (0, 1, 2))]),
    "one owner": ((3,), [RaggedShard.owned_by(1, 3)]),
    "one interleave": ((3,), [InterleavedShard(-1, 1)]),
    "beside replicas": ((2, 3), [Replicate(), ROWS]),
    "beside sums": ((3, 2), [ROWS, Partial()]),
    "within columns": ((3, 2), [ROWS, Shard(1)]),
    "within uneven rows": ((3, 2), [StridedRaggedShard((0,), (3, 2, 1), 2), Shard(0)]),
    "rows of uneven rows": ((2, 5), [StridedRaggedShard((0,), (1, 2), 5, 1), Shard(0)]),
    "over interleaves of one": ((3, 2), [ROWS, InterleavedShard(1, 1)]),
    "an owner of columns": ((2, 2), [RaggedShard.owned_by(0, 2), Shard(1)]),
}


def every_coordinate(sizes):
    return itertools.product(*map(range, sizes))


@pytest.mark.parametrize("name", BOXES)
def test_it_is_the_box_that_every_rank_holds(name):
    sizes, placements = BOXES[name]
    whole = torch.arange(72).reshape(SHAPE)
    for rank, coordinate in enumerate(every_coordinate(sizes)):
        with fake_mesh(sizes, rank=rank) as mesh:
            shape, offset = compute_local_shape_and_global_offset(SHAPE, mesh, placements)
            others = [Replicate() if p.is_partial() else p for p in placements]
            placed = distribute_tensor(whole, mesh, others, src_data_rank=None)
            assert placed.to_local().shape == shape
            box = tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
            assert placed.to_local().tolist() == whole[box].tolist()
            for at in (coordinate, list(coordinate), coordinate.__getitem__):
                found = _compute_local_shape_and_global_offset(SHAPE, sizes, at, placements)
                assert found == (shape, offset)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any), st.integers(1, 3))
def test_offsets_of_uneven_rows_are_sums_of_the_rows_before(units, rows):
    placement, shape = RaggedShard((0,), units), (sum(units) * rows, 2)
    for rank, count in enumerate(units):
        found = _compute_local_shape_and_global_offset(shape, (len(units),), (rank,), [placement])
        assert found == ((count * rows, 2), (sum(units[:rank]) * rows, 0))
        boxes = rank_boxes(shape, (len(units),), (placement,), (rank,))
        assert [(box.sizes, box.offsets) for box in boxes] == ([found] if count else [])


SEVERAL = {
    "runs of elements": ((3,), [RaggedShard((0, 1), (5, 0, 7))]),
    "interleaved chunks": ((3,), [InterleavedShard(0, 2)]),
    "rows of interleaved chunks": ((2, 2), [RaggedShard((0,), (1, 5)), InterleavedShard(0, 2)]),
    "rows of strided": ((2, 2), [RaggedShard((0,), (1, 5)), _StridedShard(1, split_factor=3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_what_is_several_boxes_is_refused_on_every_rank_but_has_a_local_shape(name):
    sizes, placements = SEVERAL[name]
    for rank in range(4 if len(sizes) == 2 else 3):
        with fake_mesh(sizes, rank=rank) as mesh:
            with pytest.raises(ValueError, match="expected placements with one box of the tensor"):
                compute_local_shape_and_global_offset(SHAPE, mesh, placements)
            shape, offset = compute_local_shape_and_global_offset(SHAPE, mesh, placements, True)
            assert (shape, offset) == (local_shape(SHAPE, mesh, tuple(placements)), ())


def test_an_owned_scalar_is_refused_for_others_hold_one_dim():
    with fake_mesh((2,)) as mesh, pytest.raises(ValueError, match="which may have several"):
        compute_local_shape_and_global_offset((), mesh, [RaggedShard.owned_by(0, 2)])


def test_placements_that_do_not_fit_are_refused():
    with (
        fake_mesh((3,)) as mesh,
        pytest.raises(ValueError, match=r"divides 12, the elements .*, got 7;"),
    ):
        compute_local_shape_and_global_offset(SHAPE, mesh, [RaggedShard((0,), (3, 3, 1))])


@pytest.mark.parametrize(
    "placement", [ROWS, RaggedShard((0, 1), (30, 0, 42)), InterleavedShard(0, 2)], ids=str
)
def test_torchs_factories_make_tensors_of_these_placements(placement):
    with fake_mesh((3,), rank=2) as mesh:
        made = zeros(SHAPE, device_mesh=mesh, placements=[placement])
        assert made.shape == SHAPE
        assert made.to_local().shape == local_shape(SHAPE, mesh, (placement,))
        assert made.to_local().count_nonzero() == 0
