"""Idle time of pipelines: laid out by what was done, against what the papers expect."""

import json

import pytest

from integration.pipeline import bubble
from integration.pipeline.bubble import expected_bubble
from integration.pipeline.schedules import SCHEDULES
from integration.pipeline.timeline import Action, median_step, replay, schedule_orders

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_equal_stages_wait_as_long_as_the_papers_say(name, ranks):
    timeline = replay(schedule_orders(SCHEDULES[name], ranks, 8, SECONDS))
    per_rank = SCHEDULES[name].stages_per_rank or 2
    assert timeline.bubble == pytest.approx(expected_bubble(name, ranks, 8, per_rank))


def test_actions_wait_for_their_rank_and_for_the_stage_beside_theirs():
    first = [Action("F", 0, 0, 1.0), Action("B", 0, 0, 1.0)]
    second = [Action("F", 1, 0, 2.0), Action("B", 1, 0, 3.0)]
    timeline = replay([first, second])
    assert [(each.rank, each.start) for each in timeline.spans] == [(0, 0), (1, 1), (1, 3), (0, 6)]
    assert timeline.seconds == 7.0
    assert timeline.bubble == pytest.approx(1 - 7 / 14)


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="each rank waits for another"):
        replay([[Action("B", 0, 0, 1.0), Action("F", 0, 0, 1.0)]])


def test_a_steady_step_has_the_median_of_each_kind_on_each_stage():
    steps = [[Action("F", 0, m, t) for m, t in enumerate(times)] for times in ((1, 9), (2, 3))]
    assert [each.seconds for each in median_step(steps)] == [2.5, 2.5]
    assert [each.microbatch for each in median_step(steps)] == [0, 1]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("schedules", [("1F1B",), ("1F1B", "ZBVZeroBubble")], ids=" ".join)
def test_the_command_measures_and_draws(schedules, tmp_path, capsys):
    arguments = ["--ranks", "2", "--steps", "1", "--json", "--schedules", *schedules]
    assert bubble.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bubble.json").read_text())
    assert [row["schedule"] for row in rows] == list(schedules)
    # A rank of two cannot wait for longer than the other works; 1F1B waits for one of nine.
    assert 0.0 < rows[0]["measured"] < 0.5
    assert rows[0]["expected"] == pytest.approx(1 / 9)
    assert rows[0]["wall"] >= 0.0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == rows
    assert printed.err.startswith(f"1/{len(schedules)}: 1F1B on 2 ranks\n")
    assert printed.err.splitlines()[-1].startswith("The idle share differs from its formula by")
    assert (tmp_path / "bubble-2.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_no_wall_clock_share_of_more_ranks_than_cores():
    rows = [
        bubble.Bubble("GPipe", ranks, 8, 1, expected, 0.123, 0.764)
        for ranks, expected in ((2, 1 / 9), (4, None))
    ]
    assert bubble.bubble_table(rows).rows == (
        ("GPipe", "2", "1", "8", "11.1%", "12.3%", "76.4%"),
        ("GPipe", "4", "1", "8", "", "12.3%", ""),
    )


def test_the_result_names_the_schedule_that_differs_most():
    def measured(schedule, expected, share):
        return bubble.Bubble(schedule, 2, 8, 1, expected, share, share)

    found = [
        measured("GPipe", 0.1, 0.12), measured("1F1B", 0.1, 0.05), measured("other", None, 0.9)
    ]  # fmt: skip
    assert "at most 5.0%, of 1F1B on 2 ranks" in bubble.result(found)
    assert "no formula" in bubble.result(found[2:])
