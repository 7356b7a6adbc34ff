"""The experiment on random numbers: its runs, and the findings on runs made up here."""

import importlib.util
import math
import re

import pytest
from rich.console import Console

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.random_numbers import (
    EXPERIMENT,
    RandomCase,
    RandomOptions,
    draw_random,
)
from integration.compare.result import Verdict
from integration.compare.variants import Source
from integration.errors import UsageError
from integration.report.html import render_html
from integration.report.markdown import render_markdown
from integration.report.palette import DARK, LIGHT
from integration.report.section import Cell, ReportPage, Table
from integration.report.terminal import print_report
from integration.train.config import parse_config

LOSSES = [5.0, 4.0, 3.5]
CLOSE = [5.0, 4.000005, 3.5]
FAR = [5.0, 4.05, 3.5]
DIST_RNG_RUN = "dropout-dtensor-tp-4-dist-rng"


@pytest.fixture
def made_up(made_up_results, tmp_path):
    """All runs: dist-rng's draw what one device draws, native ones do not.

    A keyword is a change of the run of that name: ``losses``, ``exit``, or a field of its summary.
    """

    def results(out=tmp_path, **changes):
        def describe(run):
            is_init, on_shards = run.labels["case"] == RandomCase.INIT, run.reference is not None
            native = on_shards and run.labels["source"] == Source.NATIVE
            return {
                "losses": FAR if native else CLOSE if on_shards else LOSSES,
                "initial_weights": "w2" if native and is_init else "w1",
                "first_masks": None if is_init else "m2" if native else "m1",
            } | changes.get(run.job.name, {})

        setting, results = made_up_results(EXPERIMENT, RandomOptions(steps=3), out, describe)
        (section,) = EXPERIMENT.report(setting, results).sections
        return results, section

    return results


def by_name(results):
    return {result.run.job.name: result for result in results}


def passes(results):
    return all(result.verdict.passes for result in results)


def test_two_cases_run_with_equal_batches(tmp_path):
    shared = SharedOptions(out=tmp_path, seed=3, global_batch=16, micro_batch=8)
    runs = EXPERIMENT.runs(EXPERIMENT.setting(shared, RandomOptions(steps=7)))
    for case in RandomCase:
        of_case = [run for run in runs if run.labels["case"] == case]
        assert [(run.job.system, run.job.ranks, run.labels["source"]) for run in of_case] == [
            ("single", 1, "native"),
            *(("dtensor-tp", ranks, source) for ranks in (2, 4) for source in Source),
        ]
        assert {run.reference for run in of_case[1:]} == {of_case[0].job.name}
        for run in of_case:
            config = parse_config(run.job.arguments)
            assert (config.system, config.ranks) == (run.job.system, run.job.ranks)
            assert config.random == Source(run.labels["source"]).option
            assert config.init == ("sharded" if case is RandomCase.INIT else "whole")
            assert config.dropout == (0.1 if case is RandomCase.DROPOUT else 0)
            assert (config.model, config.steps, config.seed) == ("llama-tiny", 7, 3)
            assert (config.global_batch, config.micro_batch) == (16, 8)
            assert config.fingerprint
            assert config.out == tmp_path / "runs" / "random_numbers" / run.job.name
            assert run.tolerance == 1e-5


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (RandomOptions(steps=0), r"--random-numbers\.steps is 0; it should be greater than or"),
        (RandomOptions(model="llama-9000b"), r"unknown model 'llama-9000b'"),
    ],
    ids=["steps", "model"],
)
def test_bad_options_are_refused(tmp_path, own, message):
    with pytest.raises(UsageError, match=message):
        EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(out=tmp_path), own))


def test_a_missing_dist_rng_is_refused_with_the_option_to_leave_it_out(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package dist-rng.* --experiments"):
        EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(out=tmp_path), RandomOptions()))


def test_one_device_numbers_pass_and_native_is_not_judged(made_up):
    results, section = made_up()
    assert passes(results)
    for case in (results[:5], results[5:]):
        assert [result.verdict for result in case] == [
            Verdict.REFERENCE,
            *[Verdict.UNJUDGED, Verdict.SAME] * 2,
        ]
    weights, masks = "initial_weights", "first_masks"
    init, dropout = results[:5], results[5:]
    assert [result.equal.get(weights) for result in init] == [None, False, True, False, True]
    assert [result.equal.get(masks) for result in init] == [None] * 5
    assert [result.equal.get(weights) for result in dropout] == [None, True, True, True, True]
    assert [result.equal.get(masks) for result in dropout] == [None, False, True, False, True]
    assert init[2].deviation.maximum == pytest.approx(5e-6)
    assert init[1].deviation.maximum == pytest.approx(0.05)
    for row in section.verdicts:
        assert (row.passes, row.tolerance) == (True, "1e-5")
        assert row.largest == "5e-6 nats per token"
        assert row.finding.startswith("The largest difference is that of dist-rng on 2 ranks")
        assert "differ by up to 0.05" in row.finding


@pytest.mark.parametrize(
    ("change", "verdict", "sentence"),
    [
        ({"initial_weights": "w3"}, Verdict.OTHER, "The initial weights of {} differ from those"),
        ({"first_masks": "m2"}, Verdict.OTHER, "The dropout masks of {} differ from those of the"),
        ({"first_masks": None}, Verdict.OTHER, "The dropout masks of {} differ from those of the"),
        ({"first_masks": "m2", "losses": FAR}, Verdict.OTHER, "The dropout masks of {} differ"),
        ({"losses": FAR}, Verdict.OUTSIDE, "{} exceeds its tolerance: it differs by 0.05 nats"),
        ({"losses": [5.0, math.nan, 3.5]}, Verdict.OUTSIDE, "The loss of {} is not finite from"),
        ({"losses": LOSSES[:2]}, Verdict.FAILED, "{} exited with code 0 but recorded 2 of 3 steps"),
        ({"exit": 3}, Verdict.FAILED, f"{{}} ended with exit code 3; see {DIST_RNG_RUN}.log."),
    ],
    ids=["weights", "masks", "no masks", "masks and losses", "far", "nan", "short", "exit"],
)
def test_a_run_with_dist_rng_must_draw_and_train_as_one_device(made_up, change, verdict, sentence):
    results, section = made_up(**{DIST_RNG_RUN: change})
    assert by_name(results)[DIST_RNG_RUN].verdict is verdict
    assert not passes(results)
    assert sum(not result.verdict.passes for result in results) == 1
    init, dropout = section.verdicts
    assert (init.passes, dropout.passes) == (True, False)
    assert dropout.finding.startswith(sentence.format("dist-rng on 4 ranks with dropout"))
    assert "dist-rng on 2 ranks draws the dropout masks" in dropout.finding


def test_missing_hashes_do_not_count_as_equal(made_up):
    nothing = {"first_masks": None}
    results, _ = made_up(**{DIST_RNG_RUN: nothing, "dropout-single-1-native": nothing})
    assert by_name(results)[DIST_RNG_RUN].equal["first_masks"] is False
    assert by_name(results)[DIST_RNG_RUN].verdict is Verdict.OTHER


def test_native_runs_pass_with_any_numbers_if_they_finish(made_up, tmp_path):
    name = "init-dtensor-tp-2-native"
    assert passes(made_up(tmp_path / "a", **{name: {"losses": [math.nan] * 3}})[0])
    assert not passes(made_up(tmp_path / "b", **{name: {"exit": 1}})[0])


def test_a_case_without_its_reference_is_not_compared_and_the_other_is(made_up):
    results, section = made_up(**{"init-single-1-native": {"exit": 1}})
    assert [result.verdict for result in results[:3]] == [
        Verdict.FAILED,
        *[Verdict.UNCOMPARED] * 2,
    ]
    assert results[7].verdict is Verdict.SAME
    assert [row.passes for row in section.verdicts] == [False, True]


def test_the_rows_leave_out_what_does_not_apply(made_up):
    _, section = made_up()
    (table,) = (each for each in section.contents if isinstance(each, Table))
    titles = [column.title for column in table.columns]
    rows = [
        {title: cell.text if isinstance(cell, Cell) else cell for title, cell in row}
        for row in (zip(titles, row, strict=True) for row in table.rows)
    ]
    assert [row["case"] for row in rows] == ["random init"] * 5 + ["dropout"] * 5
    single, native, drawn = rows[5:8]
    absent = "\N{EN DASH}"
    assert (single["random numbers"], single["masks"], single["max |Δ|"]) == (absent,) * 3
    assert (native["random numbers"], native["ranks"]) == ("native", "2")
    assert (native["initial weights"], native["masks"], native["tolerance"]) == (
        *("equal", "differ"),
        absent,
    )
    assert (drawn["initial weights"], drawn["masks"], drawn["tolerance"]) == (
        *("equal", "equal"),
        "1e-5",
    )
    assert (drawn["max |Δ|"], drawn["at step"]) == ("5e-6", "2")
    assert {row["masks"] for row in rows[:5]} == {absent}
    marks = [row[titles.index("verdict")].passes for row in table.rows[5:]]
    assert marks == [True, None, True, None, True]


def test_the_figure_shows_every_run_of_both_cases(made_up):
    results, _ = made_up()
    figure = draw_random(results, LIGHT)
    panels = figure.get_axes()
    assert [axes.get_title(loc="left") for axes in panels] == ["Random init only", "Dropout only"]
    assert panels[0].get_ylim() == panels[1].get_ylim()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        f"{source}, {ranks} ranks" for ranks in (2, 4) for source in ("native DTensor", "dist-rng")
    ]
    bottom, top = panels[0].get_ylim()
    for axes in panels:
        shown = [
            *(y for line in axes.get_lines() if len(line.get_xdata()) for y in line.get_ydata())
        ]
        finite = [y for y in shown if math.isfinite(y)]
        # Four runs of three steps, and both ends of the tolerance.
        assert len(finite) == 4 * 3 + 2
        assert all(bottom < y < top for y in finite)
        assert len({(line.get_color(), line.get_marker()) for line in axes.get_lines()}) == 5


def test_the_figure_survives_runs_without_numbers(made_up, tmp_path):
    results, _ = made_up(tmp_path / "a")
    references = [result for result in results if result.verdict is Verdict.REFERENCE]
    for axes in draw_random(references, DARK).get_axes():
        assert [text.get_text() for text in axes.texts] == ["nothing to compare"]
    draw_random(made_up(tmp_path / "b", **{DIST_RNG_RUN: {"exit": 7}})[0], DARK)


def test_every_form_of_the_report_has_a_row_per_run_in_eighty_columns(made_up, tmp_path, capsys):
    _, section = made_up()
    report = ReportPage("report", (section,))
    rows = re.findall(r"^\| (?:random init|dropout) \|.*\|$", render_markdown(report), re.MULTILINE)
    assert len(rows) == 10
    assert len({row.count("|") for row in rows}) == 1
    assert render_html(report).count("same numbers") == 4
    print_report(report, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    table = [line for line in printed if line.startswith(("random init ", "dropout "))]
    assert len(table) == 10
    assert table[-1].split() == [
        *("dropout", "4", "dist-rng", "same", "numbers", "equal", "equal", "5e-6")
    ]
