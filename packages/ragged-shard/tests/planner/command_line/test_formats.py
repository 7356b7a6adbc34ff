"""Shares and counts in words."""

import pytest

from ragged_shard.planner.command_line.sweep import percent, rows


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0.000 %"),
        (1e-9, "<0.001 %"),
        (0.0000049, "<0.001 %"),
        (0.000005, "0.001 %"),
        (0.17311, "17.311 %"),
        (1.11, "111.000 %"),
    ],
)
def test_almost_nothing_is_not_nothing(share, text):
    assert percent(share) == text


def test_one_row_is_no_plural():
    assert [rows(count) for count in (1, 2, 1024)] == ["1 row", "2 rows", "1,024 rows"]
