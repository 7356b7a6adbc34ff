"""The grid: every cell is one part's, whatever the tensor's size."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import InterleavedShard, RaggedShard
from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.grid import grid
from ragged_shard.visualization.ownership import ownership


def of(shape, placements, mesh_shape=(2,)):
    return ownership(shape, mesh_shape=mesh_shape, placements=placements)


@st.composite
def owned(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    size = draw(st.integers(1, 4))
    choices = [Replicate()]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        choices += [
            Shard(dim),
            _StridedShard(dim, split_factor=2),
            InterleavedShard(dim, shape[dim]),
        ]
        total = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1)))
        units = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        choices.append(RaggedShard(range(len(shape)), units))
    return of(shape, [draw(st.sampled_from(choices))], (size,))


@given(owned(), st.integers(1, 12), st.integers(1, 12))
def test_all_elements_of_a_cell_are_the_parts_that_it_names(ownership, max_rows, max_columns):
    found = grid(ownership, max_rows, max_columns)
    assert 1 <= len(found.cells) <= max_rows
    assert 1 <= len(found.columns) <= max_columns
    assert len(found.headings) == len(found.cells)
    first = ownership.ranks.reshape(*(ownership.shape or (1,)), -1)[..., 0]
    ranges = [[slice(a, b) for a, b in itertools.pairwise(of_dim)] for of_dim in found.edges]
    leading = list(itertools.product(*ranges[:-1]))
    for rows, cells in zip(leading, found.cells, strict=True):
        for columns, part in zip(ranges[-1], cells, strict=True):
            holders = set(first[(*rows, columns)].flatten().tolist())
            assert holders == {ownership.parts[part].ranks[0]}


@given(owned())
def test_a_small_tensor_has_a_cell_per_element(ownership):
    found = grid(ownership, 9**3, 9)
    assert not found.scaled
    assert len(found.cells) * len(found.columns) == math.prod(ownership.shape)
    assert found.drawn == TensorBox((0,) * len(ownership.shape), ownership.shape)


def test_a_sliver_of_a_large_tensor_is_seen():
    found = grid(of((4096, 4096), [RaggedShard((0,), (1, 4095))]), 8, 8)
    assert found.edges[0][:2] == (0, 1)
    assert len(found.cells) == len(found.columns) == 8
    assert found.cells == ((0,) * 8, *((1,) * 8,) * 7)
    assert found.scaled
    assert found.drawn == TensorBox((0, 0), (4096, 4096))


def test_room_goes_to_the_widest_cells():
    found = grid(of((100,), [RaggedShard((0,), (1, 9))]), 1, 10)
    assert found.columns == (0, 10, 20, 30, 40, 50, 60, 70, 80, 90)


def test_several_leading_dims_are_cut_only_where_holders_change():
    found = grid(of((64, 64, 3, 3), [Shard(1), Shard(2)], (2, 3)), 24, 24)
    assert found.headings == ("0,0,0", "0,0,1", "0,0,2", "0,32,0", "0,32,1", "0,32,2")
    assert found.cells == tuple((n,) * 3 for n in range(6))


def test_what_is_too_fine_is_drawn_from_its_beginning():
    found = grid(of((1024, 8), [InterleavedShard(0, 128)]), 10, 8)
    assert found.edges[0] == tuple(range(0, 44, 4))
    assert found.cells == tuple((n % 2,) * 8 for n in range(10))
    assert found.drawn == TensorBox((0, 0), (40, 8))


def test_the_other_dims_keep_their_room_where_one_is_too_fine():
    found = grid(of((2, 1024, 8), [Shard(0), InterleavedShard(1, 128)], (2, 2)), 10, 8)
    assert found.headings == tuple(f"{a},{b}" for a in range(2) for b in range(0, 20, 4))
    assert found.drawn == TensorBox((0, 0, 0), (2, 20, 8))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_a_tensor_without_elements_has_no_cells(shape):
    found = grid(of(shape, [Shard(0)]), 8, 8)
    assert found.cells == ()
    assert found.columns == ()
    assert found.drawn.sizes == shape


def test_a_scalar_is_one_cell():
    found = grid(of((), [RaggedShard.owned_by(1, 2)]), 8, 8)
    assert found.cells == ((1,),)
    assert found.headings == ("",)
    assert found.drawn == TensorBox((), ())
