"""The compiled walk against Region.runs(), element by element."""

from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_rng.cpu.backend import compiled_layout
from dist_rng.regions.region import DrawRun, IndexRange, Region


def elements(runs):
    """Returns every element of the runs as (draw index, local offset)."""
    return [(run.draw + i, run.local + i * run.stride) for run in runs for i in range(run.count)]


def compiled(region, shape=None, strides=None):
    shape = region.grid_shape if shape is None else shape
    strides = region.dense_strides() if strides is None else strides
    return [
        DrawRun(*run) for run in compiled_layout(region, tuple(shape), tuple(strides)).grid.runs()
    ]


def subsets_of_pieces(size):
    """Yields every subset of the indices 0 .. size - 1, as pieces."""
    for selected in product((False, True), repeat=size):
        pieces, start = [], None
        for index, is_selected in enumerate((*selected, False)):
            if is_selected and start is None:
                start = index
            if not is_selected and start is not None:
                pieces.append(IndexRange(start, index))
                start = None
        yield tuple(pieces)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 4), (4, 1), (2, 3, 2), (2, 1, 3), (1, 1), ()])
def test_every_region_of_a_small_tensor_equals_the_reference_walk(shape):
    for pieces in product(*(list(subsets_of_pieces(size)) for size in shape)):
        for order in permutations(range(len(shape))):
            region = Region(shape, pieces, order)
            assert elements(compiled(region)) == elements(region.runs())


@pytest.mark.parametrize("shape", [(6,), (2, 4), (2, 2, 2)])
def test_every_window_of_a_small_grid_equals_the_reference_walk(shape):
    dims = tuple(range(len(shape)))
    for pieces in product(*(list(subsets_of_pieces(size)) for size in shape)):
        grid = Region(shape, pieces, dims)
        for windows in subsets_of_pieces(grid.numel):
            region = grid.within(*windows)
            local_shape, local_strides = (region.numel,), (1,)
            walked = compiled(region, local_shape, local_strides)
            assert elements(walked) == elements(region.runs())


@pytest.mark.parametrize("strides", [(20, 5, 1), (1, 2, 6), (40, 10, 2), (1, 100, 7)])
def test_any_local_strides_equal_the_reference_walk(strides):
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
def test_regions_of_up_to_five_dims_equal_the_reference_walk(case):
    shape, indices, order = case
    pieces = tuple(
        tuple(IndexRange(index, index + 1) for index in sorted(each)) for each in indices
    )
    region = Region(shape, pieces, tuple(order))
    assert elements(compiled(region)) == elements(region.runs())


def test_runs_ascend_and_a_shard_of_the_first_dim_is_one_run():
    region = Region.box((64, 32, 16), (10, 0, 0), (5, 32, 16))
    assert compiled(region) == [DrawRun(10 * 512, 5 * 512, 0, 1)]
    inner = Region.box((8, 6, 4), (1, 2, 1), (5, 3, 2))
    for before, after in pairwise(compiled(inner)):
        assert before.draw + before.count <= after.draw


def test_a_late_window_of_a_long_grid_is_found_without_a_walk_from_its_start():
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
def test_a_mismatching_local_tensor_raises(shape, strides, message):
    region = Region.box((6, 4), (0, 0), (3, 4))
    with pytest.raises(ValueError, match=message):
        compiled_layout(region, shape, strides)


def test_windows_with_a_strided_local_tensor_raise():
    region = Region.flat((6, 4), 3, 15)
    with pytest.raises(ValueError, match="contiguous local tensor"):
        compiled_layout(region, (12,), (2,))
    assert compiled_layout(region, torch.Size((3, 1, 4)), (4, 99, 1)).grid.runs() == [[3, 12, 0, 1]]
