"""Regions, compared with indexing a tensor of draw indices."""

import subprocess
import sys
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import IndexRange, Region


def draw_indices(shape, order):
    """Returns the global tensor whose elements are their draw indices."""
    in_memory = torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order])
    return in_memory.permute([order.index(dim) for dim in range(len(shape))])


def scatter(region):
    """Returns the local tensor that region.runs() describes, dense in the region's order."""
    storage = torch.full((region.numel,), -1)
    for run in region.runs():
        places = slice(run.local, run.local + run.count * run.stride, run.stride)
        assert (storage[places] == -1).all(), "an element was drawn twice"
        storage[places] = torch.arange(run.draw, run.draw + run.count)
    if region.windows is not None:
        return storage
    return storage.as_strided(region.grid_shape, region.dense_strides())


@st.composite
def pieces_of(draw, size):
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    return tuple(IndexRange(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))


@st.composite
def regions(draw, windows):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    grid = tuple(draw(pieces_of(size)) for size in shape)
    dims = tuple(range(len(shape)))
    if not windows:
        return Region(shape, grid, draw(st.permutations(dims).map(tuple)))
    region = Region(shape, grid, dims)
    return region.within(*draw(pieces_of(region.numel)))


@given(regions(windows=False))
def test_runs_contain_every_element_once_in_any_memory_order(region):
    expected = slice_of(draw_indices(region.global_shape, region.memory_order), region)
    assert torch.equal(scatter(region), expected)


@given(regions(windows=True))
def test_windows_select_a_part_of_the_grid(region):
    expected = slice_of(draw_indices(region.global_shape, region.memory_order), region)
    assert torch.equal(scatter(region), expected)


@given(st.one_of(regions(windows=False), regions(windows=True)))
def test_runs_ascend(region):
    runs = list(region.runs())
    assert sum(run.count for run in runs) == region.numel
    for before, after in pairwise(runs):
        assert before.draw + before.count <= after.draw


@given(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.data())
def test_selecting_twice_equals_slicing_twice(shape, data):
    region, full = Region.full(shape), draw_indices(shape, tuple(range(len(shape))))
    for _ in range(2):
        dim = data.draw(st.integers(0, len(shape) - 1))
        ranges = data.draw(pieces_of(region.grid_shape[dim]))
        region = region.select(dim, *ranges)
        rows = [index for piece in ranges for index in range(piece.start, piece.stop)]
        full = full.index_select(dim, torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(scatter(region), full)
    first = data.draw(pieces_of(region.numel))
    region, flat = region.within(*first), full.flatten()
    second = data.draw(pieces_of(region.numel))
    for windows in (first, second):
        flat = torch.cat([flat[:0], *(flat[w.start : w.stop] for w in windows)])
    assert torch.equal(scatter(region.within(*second)), flat)


def test_box_and_flat_are_slices():
    full = draw_indices((4, 6), (0, 1))
    assert torch.equal(scatter(Region.box((4, 6), (1, 2), (2, 3))), full[1:3, 2:5])
    assert torch.equal(scatter(Region.flat((4, 6), 5, 17)), full.flatten()[5:17])


def test_a_scalar_and_an_empty_part():
    assert [run.count for run in Region.full(()).runs()] == [1]
    empty = Region.box((4, 6), (2, 0), (0, 6))
    assert (empty.numel, empty.global_numel, list(empty.runs())) == (0, 24, [])


def test_strides_of_the_local_tensor_are_used():
    runs = list(Region.box((2, 4), (0, 1), (2, 2)).runs(local_strides=(10, 3)))
    assert [(run.draw, run.local, run.stride) for run in runs] == [(1, 0, 3), (5, 10, 3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Region.box((4,), (2,), (3,)),
            r"pieces of dim 0 of \(4,\): .* got \[2, 5\)",
        ),
        (lambda: Region.box((4,), (-1,), (3,)), r"inside \[0, 4\), got \[-1, 2\)"),
        (lambda: Region.box((4, 4), (0,), (1,)), "expected 2 offsets and sizes"),
        (lambda: Region.flat((4, 4), 3, 17), r"windows of \(4, 4\): .* got \[3, 17\)"),
        (
            lambda: Region.full((4,)).select(0, IndexRange(2, 3), IndexRange(1, 2)),
            "ascending",
        ),
        (lambda: Region.flat((4,), 0, 2).select(0, IndexRange(0, 1)), "without windows"),
        (lambda: Region((4,), (), (0,)), "one list of pieces"),
        (lambda: Region((4,), ((),), (1,)), "permutation of 1 dims"),
        (
            lambda: Region.full((4, 4)).with_memory_order((1, 0)).within(IndexRange(0, 2)),
            "expected a contiguous global tensor",
        ),
    ],
)
def test_the_error_for_invalid_input_contains_its_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_module_does_not_import_torch():
    code = (
        "import sys, types, importlib, importlib.util\n"
        "(folder,) = importlib.util.find_spec('dist_rng').submodule_search_locations\n"
        "package = sys.modules['dist_rng'] = types.ModuleType('dist_rng')\n"  # not its __init__.py
        "package.__path__ = [folder]\n"
        "module = importlib.import_module('dist_rng.regions.region')\n"
        "assert sum(run.count for run in module.Region.full((3, 4)).runs()) == 12\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_memory_order_of_a_box():
    for order in permutations(range(3)):
        region = Region.box((3, 4, 5), (1, 0, 2), (2, 3, 3)).with_memory_order(order)
        expected = draw_indices((3, 4, 5), order)[1:3, 0:3, 2:5]
        assert torch.equal(scatter(region), expected)


def test_sizes_and_offsets_are_any_integers_and_become_ints():
    number = np.int64
    shape = (number(4), number(6))
    assert Region.full(shape) == Region.full((4, 6))
    box = Region.box(shape, (number(1), number(2)), (number(2), number(3)))
    flat = Region.flat(shape, number(3), number(9))
    assert (box, flat) == (Region.box((4, 6), (1, 2), (2, 3)), Region.flat((4, 6), 3, 9))
    found = [*box.global_shape, *(end for (p,) in box.pieces for end in (p.start, p.stop))]
    found += [end for window in flat.windows for end in (window.start, window.stop)]
    assert {type(n) for n in found} == {int}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Region.full((4, 2.5)),
        lambda: Region.box((4, 6), (1, 2.0), (2, 3)),
        lambda: Region.box((4, 6), (1, 2), (2, 3.5)),
        lambda: Region.flat((4, 6), 0, 3.5),
    ],
    ids=["size", "offset", "size of the box", "stop"],
)
def test_floats_raise(make):
    with pytest.raises(TypeError, match="integer"):
        make()
