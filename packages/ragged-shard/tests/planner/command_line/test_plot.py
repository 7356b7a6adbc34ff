"""The pictures show what was planned: read back from the figures, and from the files."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from ragged_shard.planner import TensorSpec, plan_layout
from ragged_shard.planner.command_line.sweep import GroupPlan, SweepPoint

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from ragged_shard.planner.command_line.plot import (
    COLOURS,
    OTHER,
    RANKS_SHOWN,
    layout_figure,
    padding_figure,
    save,
)


def point(rows, world_size, padding):
    return SweepPoint(
        world_size, rows, (GroupPlan("a", 1_000, 1, padding, 1, exact=True, identical=1),)
    )


POINTS = [point(rows, size, rows * size) for rows in (1, 16) for size in (2, 4, 8)]


def bars(figure):
    """Every bar of a layout's picture: its row, and where it begins and ends, by its colour."""
    found = {}
    for collection in figure.axes[0].collections:
        key = "padding" if collection.get_hatch() else to_hex(collection.get_facecolor()[0])
        for path in collection.get_paths():
            box = path.get_extents()
            row = round(float(box.y0 + box.y1) / 2)
            found.setdefault(key, []).append((row, float(box.x0), float(box.x1)))
    return found


def legend(figure):
    (shown,) = figure.legends
    return [text.get_text() for text in shown.get_texts()]


def test_there_is_a_line_for_every_granularity_in_percent():
    figure = padding_figure(POINTS, "toy")
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["1 row", "16 rows"]
    assert list(lines["16 rows"].get_xdata()) == [2, 4, 8]
    assert list(lines["16 rows"].get_ydata()) == pytest.approx([3.2, 6.4, 12.8])
    assert axes.get_ylim()[0] == 0
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]


def test_lines_differ_in_colour_and_in_marker():
    lines = padding_figure([point(rows, 8, 1) for rows in range(1, 7)], "toy").axes[0].get_lines()
    assert len({line.get_color() for line in lines}) == 6
    assert len({line.get_marker() for line in lines}) == 6


SPECS = [TensorSpec("a.0.w", 30, 7), TensorSpec("norm", 5), TensorSpec("a.1.w", 30, 7)]


def test_bars_are_the_parts_of_every_rank_and_the_rest_is_padding():
    layout = plan_layout(SPECS, 4)
    assert layout.padding > 0
    found = bars(layout_figure(layout, "toy"))
    assert found.keys() == {"padding", COLOURS[0].lower(), COLOURS[1].lower()}
    for rank in range(4):
        expected = {
            (part.offset, part.offset + part.interval.size, part.tensor == 1)
            for part in layout.parts(rank)
        }
        drawn = {
            (round(start), round(stop), key == COLOURS[1].lower())
            for key, rows in found.items()
            for row, start, stop in rows
            if row == rank and key != "padding"
        }
        assert drawn == expected
        # Together they cover the shard from end to end, nowhere twice.
        spans = sorted((a, b) for rows in found.values() for row, a, b in rows if row == rank)
        assert spans[0][0] == 0
        assert spans[-1][1] == pytest.approx(layout.shard_size)
        assert all(left[1] == pytest.approx(right[0]) for left, right in pairwise(spans))
    padding = math.fsum(stop - start for _, start, stop in found["padding"])
    assert padding == pytest.approx(layout.padding)


def test_the_legend_names_kinds_and_how_much_is_padding():
    layout = plan_layout(SPECS, 4)
    ratio = f"{100 * layout.padding_ratio:.3f} %"
    assert legend(layout_figure(layout, "toy")) == ["a.*.w", "norm", f"padding, {ratio}"]


def test_kinds_beyond_the_colours_are_the_other_tensors():
    specs = [TensorSpec(f"t{letter}", 10 + index) for index, letter in enumerate("abcdefgh")]
    figure = layout_figure(plan_layout(specs, 2), "toy")
    assert legend(figure)[:7] == [*(f"t{letter}" for letter in "hgfedc"), "other tensors"]
    assert OTHER.lower() in bars(figure)


def test_of_many_ranks_the_first_and_the_last_are_shown():
    figure = layout_figure(plan_layout(SPECS, 60), "toy")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    half = RANKS_SHOWN // 2
    assert labels == [str(rank) for rank in (*range(half), *range(60 - half, 60))]
    assert len(figure.axes[0].get_lines()) == 1  # where ranks are left out
    assert figure.axes[0].get_title(loc="left") == "toy (28 in the middle omitted)"
    whole = layout_figure(plan_layout(SPECS, RANKS_SHOWN), "toy").axes[0]
    assert (whole.get_title(loc="left"), len(whole.get_lines())) == ("toy", 0)


def test_both_files_are_pictures(tmp_path):
    png, svg = save(padding_figure(POINTS, "toy.v1"), tmp_path / "toy.v1-padding")
    assert (png.name, svg.name) == ("toy.v1-padding.png", "toy.v1-padding.svg")
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ET.parse(svg).getroot().tag.endswith("svg")
