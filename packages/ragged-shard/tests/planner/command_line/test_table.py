"""A sweep as a table."""

import io

import pytest

from ragged_shard.planner.command_line.output import HEADINGS, cells, plain_table, print_table
from ragged_shard.planner.command_line.sweep import GroupPlan, SweepPoint


def plan(name, padding, *, proved=1_010, identical=1):
    exact = proved == 1_010
    return GroupPlan(name, 10_000, 1_010, padding, proved, exact=exact, identical=identical)


POINTS = (
    SweepPoint(8, 1, (plan("layers.0", 0), plan("root", 0))),
    SweepPoint(1_024, 1, (plan("layers.0", 200, identical=3), plan("root", 100))),
    SweepPoint(8, 128, (plan("layers.0", 1_200, proved=1_000), plan("root", 1_500))),
)


def test_a_line_says_what_is_held_what_is_padding_and_what_is_proved():
    assert cells(POINTS[0]) == ("1", "8", "2,020", "0.000 %", "-", "-", "smallest")
    assert cells(POINTS[1]) == (
        "1", "1,024", "2,020", "1.500 %", "layers.0 (x3)", "2.000 %", "smallest"
    )  # fmt: skip
    assert cells(POINTS[2]) == (
        "128", "8", "2,020", "13.500 %", "root", "15.000 %", "within 0.498 %"
    )  # fmt: skip


def test_the_plain_table_is_aligned_and_parts_granularities():
    assert plain_table(POINTS).splitlines() == [
        "rows  ranks  per rank   padding  worst group    its padding  proved",
        "----  -----  --------  --------  -------------  -----------  --------------",
        "   1      8     2,020   0.000 %  -                        -  smallest",
        "   1  1,024     2,020   1.500 %  layers.0 (x3)      2.000 %  smallest",
        "",
        " 128      8     2,020  13.500 %  root              15.000 %  within 0.498 %",
    ]  # fmt: skip


def test_the_largest_preset_fits_into_80_columns():
    pytest.importorskip("rich")
    group = GroupPlan("layers.10", 10**10, 83_891_960_704, 10**9, 1, exact=True, identical=58)
    file = io.StringIO()
    print_table([SweepPoint(1_024, 128, (group,))], file)
    assert 70 < max(len(line) for line in file.getvalue().splitlines()) <= 80


def test_the_drawn_table_holds_the_same_words_whole_and_no_colour_in_a_file():
    pytest.importorskip("rich")
    file = io.StringIO()
    print_table(POINTS, file)
    text = file.getvalue()
    for word in (*HEADINGS, *(cell for point in POINTS for cell in cells(point))):
        assert word in text
    assert "\x1b" not in text
    assert len([line for line in text.splitlines() if "2,020" in line]) == len(POINTS)
