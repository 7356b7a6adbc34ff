"""Boxes for the CUDA kernels: together they contain the region, element by element."""

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_rng.cuda.boxes import boxes_of
from dist_rng.regions.draw_strides import draw_strides
from dist_rng.regions.region import IndexRange, Region


def elements(boxes):
    """Yields the elements of the boxes as (draw index, local offset), computed as by the kernel."""
    for box in boxes:
        for position in range(box.first, box.first + box.count):
            rest, draw, local = position, box.draw, box.local
            for dim in reversed(box.dims):
                rest, index = divmod(rest, dim.size)
                piece, inside = divmod(index, dim.length)
                draw += (piece * dim.period + inside) * dim.draw_stride
                local += index * dim.local_stride
            assert rest == 0
            yield draw, local


def expected(region, strides):
    return sorted(
        (run.draw + i, run.local + i * run.stride)
        for run in region.runs(strides)
        for i in range(run.count)
    )


def assert_boxes_are(region, strides=None):
    strides = region.dense_strides() if strides is None else strides
    boxes = boxes_of(draw_strides(region, tuple(strides)))
    assert sorted(elements(boxes)) == expected(region, strides)
    return boxes


def some_pieces(size):
    """Yields all indices, one, two pieces of one length, and an interleaved uneven shard."""
    yield (IndexRange(0, size),)
    yield (IndexRange(size - 1, size),)
    if size > 2:
        yield (IndexRange(0, 1), IndexRange(2, 3))
    if size > 4:
        yield tuple(IndexRange(start, min(start + 2, size)) for start in range(0, size, 3))


@pytest.mark.parametrize("shape", [(), (9,), (1, 8), (4, 6), (3, 4, 5), (2, 3, 1, 5)], ids=str)
def test_boxes_contain_every_element_of_a_region_once(shape):
    for pieces in product(*(list(some_pieces(size)) for size in shape)):
        for order in permutations(range(len(shape))):
            assert_boxes_are(Region(shape, pieces, order))


@pytest.mark.parametrize("strides", [(40, 10, 2), (1, 3, 12), (100, 0, 1)], ids=str)
def test_any_local_strides(strides):
    for pieces in product(*(list(some_pieces(size)) for size in (3, 4, 5))):
        assert_boxes_are(Region((3, 4, 5), pieces, (0, 1, 2)), strides)


@given(data=st.data())
def test_windows_of_grids(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    pieces = tuple(data.draw(st.sampled_from(list(some_pieces(size)))) for size in shape)
    grid = Region(shape, pieces, tuple(range(len(shape))))
    ends = sorted(data.draw(st.lists(st.integers(0, grid.numel), max_size=6)))
    pairs = zip(ends[::2], ends[1::2], strict=False)
    windows = [IndexRange(start, stop) for start, stop in pairs if start < stop]
    if windows:
        assert_boxes_are(grid.within(*windows))


def test_a_row_shard_is_one_box_of_one_dim():
    (box,) = assert_boxes_are(Region.full((8, 5, 3)).select(0, IndexRange(2, 5)))
    assert len(box.dims) == 1
    assert (box.draw, box.count) == (30, 45)


def test_a_strided_shard_is_one_box_and_a_second_one_for_a_shorter_last_piece():
    def interleaved(size):
        pieces = [IndexRange(start, min(start + 2, size)) for start in range(0, size, 4)]
        return Region.full((size, 3)).select(0, *pieces)

    assert len(assert_boxes_are(interleaved(64))) == 1
    assert len(assert_boxes_are(interleaved(65))) == 2


def test_more_dims_than_a_kernel_takes_become_runs():
    shape = (2,) * 10
    region = Region.full(shape)
    for dim in range(0, 10, 2):
        region = region.select(dim, IndexRange(1, 2))
    strides = tuple(3**dim for dim in range(10))
    assert_boxes_are(region, strides)
    assert_boxes_are(Region.full(shape), strides)
