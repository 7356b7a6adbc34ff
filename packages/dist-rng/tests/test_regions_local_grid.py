"""The compiled walk against Region.runs(), element by element."""

from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_rng.cpu.backend import compiled_layout
from dist_rng.regions.region import DrawRun, IndexRange, Region


def elements(runs):
    """Every element of the runs as (draw index, local offset)."""
    return [(run.draw + i, run.local + i * run.stride) for run in runs for i in range(run.count)]


def compiled(region, shape=None, strides=None):
    shape = region.grid_shape if shape is None else shape
    strides = region.dense_strides() if strides is None else strides
    return [
        DrawRun(*run) for run in compiled_layout(region, tuple(shape), tuple(strides)).grid.runs()
    ]


def subsets_of_pieces(size):
    """Every way to hold some of the indices 0 .. size - 1, as pieces."""
    for held in product((False, True), repeat=size):
        pieces, start = [], None
        for index, holds in enumerate((*held, False)):
            if holds and start is None:
                start = index
            if not holds and start is not None:
                pieces.append(IndexRange(start, index))
                start = None
        yield tuple(pieces)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 4), (4, 1), (2, 3, 2), (2, 1, 3), (1, 1), ()])
def test_every_region_of_a_small_tensor_walks_as_the_reference(shape):
    for pieces in product(*(list(subsets_of_pieces(size)) for size in shape)):
        for order in permutations(range(len(shape))):
            region = Region(shape, pieces, order)
            assert elements(compiled(region)) == elements(region.runs())


@pytest.mark.parametrize("shape", [(6,), (2, 4), (2, 2, 2)])
def test_every_window_of_a_small_grid_walks_as_the_reference(shape):
    dims = tuple(range(len(shape)))
    for pieces in product(*(list(subsets_of_pieces(size)) for size in shape)):
        grid = Region(shape, pieces, dims)
        for windows in subsets_of_pieces(grid.numel):
            region = grid.within(*windows)
            shape_held, strides_held = (region.numel,), (1,)
            walked = compiled(region, shape_held, strides_held)
            assert elements(walked) == elements(region.runs())


@pytest.mark.parametrize("strides", [(20, 5, 1), (1, 2, 6), (40, 10, 2), (1, 100, 7)])
def test_any_local_strides_walk_as_the_reference(strides):
    for pieces in ((IndexRange(0, 2), IndexRange(3, 4)), (IndexRange(1, 3),), (IndexRange(0, 4),)):
        region = Region(
            (4, 4, 5),
            (pieces, (IndexRange(0, 4),), (IndexRange(0, 2), IndexRange(3, 5))),
            (0, 1, 2),
        )
        walked = compiled(region, strides=strides)
        assert elements(walked) == elements(region.runs(strides))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.tuples(*(st.sets(st.integers(0, size - 1)) for size in shape)),
            st.permutations(range(len(shape))),
        )
    )
)
def test_regions_of_up_to_five_dims_walk_as_the_reference(case):
    shape, held, order = case
    pieces = tuple(tuple(IndexRange(index, index + 1) for index in sorted(each)) for each in held)
    region = Region(shape, pieces, tuple(order))
    assert elements(compiled(region)) == elements(region.runs())


def test_runs_ascend_and_a_shard_of_the_first_dim_is_one_run():
    region = Region.box((64, 32, 16), (10, 0, 0), (5, 32, 16))
    assert compiled(region) == [DrawRun(10 * 512, 5 * 512, 0, 1)]
    inner = Region.box((8, 6, 4), (1, 2, 1), (5, 3, 2))
    for before, after in pairwise(compiled(inner)):
        assert before.draw + before.count <= after.draw


def test_a_late_window_of_a_long_grid_needs_no_walk_from_the_start():
    rows = 10**9
    region = Region.box((rows, 8), (0, 2), (rows, 4)).within(IndexRange(4 * rows - 6, 4 * rows))
    walked = compiled_layout(region, (6,), (1,)).grid.runs()
    assert walked == [[8 * rows - 12, 2, 0, 1], [8 * rows - 6, 4, 2, 1]]


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((3, 5), (5, 1), "pass the region of this tensor"),
        ((3, 4), (0, 1), "clone it first"),
    ],
)
def test_a_local_tensor_that_does_not_fit_is_refused(shape, strides, message):
    region = Region.box((6, 4), (0, 0), (3, 4))
    with pytest.raises(ValueError, match=message):
        compiled_layout(region, shape, strides)


def test_windows_refuse_a_local_tensor_with_gaps():
    region = Region.flat((6, 4), 3, 15)
    with pytest.raises(ValueError, match="contiguous local tensor"):
        compiled_layout(region, (12,), (2,))
    assert compiled_layout(region, torch.Size((3, 1, 4)), (4, 99, 1)).grid.runs() == [[3, 12, 0, 1]]
