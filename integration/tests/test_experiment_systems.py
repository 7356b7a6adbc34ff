"""The experiment on systems: its runs, and the findings on runs made up here."""

import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.systems import (
    EXPERIMENT,
    RelativeTime,
    SystemOptions,
    draw_cost,
    relative_times,
)
from integration.compare.measurements import deviation
from integration.compare.report import ExperimentResults
from integration.compare.result import Verdict, by_model
from integration.compare.variants import get_variant
from integration.report.figures import svg_of
from integration.report.formatting import ABSENT, TIMES
from integration.report.html import render_html
from integration.report.markdown import render_markdown
from integration.report.palette import DARK, LIGHT, style_of
from integration.report.section import Cell, Figure, ReportPage, Table
from integration.report.terminal import print_report
from integration.train.metrics import CollectiveCount

COLLECTIVES = [
    CollectiveCount("all_gather", 4, 2 * 2**20),
    CollectiveCount("reduce_scatter", 1, 2**20),
]
FLOPS = 7_723_000_000  # of a microbatch
LOSSES = [5.0, 4.0, 3.5, 3.25, 3.0]
SHIFTED = [5.0, 4.000005, 3.5, 3.249998, 3.0]
LOST = [5.0, 4.0, math.nan, math.inf, 3.0]
FAR = [5.0, 4.5, 3.5, 3.25, 3.0]


@pytest.fixture
def made_up(made_up_results, tmp_path):
    """The results and findings of curves by system; None is a run that failed."""

    def results(models="llama-tiny", **curves):
        def describe(run):
            losses, ranks = curves[run.job.system], run.job.ranks
            return {
                "losses": losses or LOSSES[:2],
                "exit": 0 if losses else 7,
                "seconds": 0.25 * ranks,
                "data_parallel_degree": ranks,
                "accumulation": 2 // ranks,
                "peak_rss_bytes": [2**20 * (400 + 20 * rank) for rank in range(ranks)],
                "collectives": COLLECTIVES if ranks > 1 else [],
                "product_flops": FLOPS * 2 // ranks,
            }

        own = SystemOptions(systems=",".join(curves), models=models, steps=5)
        setting, results = made_up_results(EXPERIMENT, own, tmp_path, describe)
        return results, EXPERIMENT.report(setting, results)

    return results


@pytest.fixture
def good(made_up):
    return made_up(single=LOSSES, ddp=LOSSES, fsdp1=LOSSES, fsdp2=SHIFTED)


@pytest.fixture
def bad(made_up):
    return made_up(single=LOSSES, ddp=FAR, fsdp1=None, fsdp2=LOST)


def tables(findings):
    """The rows of the tables of both sections, by system, as texts by column."""
    found = []
    for section in findings.sections:
        for table in (each for each in section.contents if isinstance(each, Table)):
            titles = [column.title for column in table.columns]
            rows = [
                [cell.text if isinstance(cell, Cell) else cell for cell in row]
                for row in table.rows
            ]
            found.append({row[0]: dict(zip(titles, row, strict=True)) for row in rows})
    return found


def figures(findings):
    contents = [each for section in findings.sections for each in section.contents]
    return [each for each in contents if isinstance(each, Figure)]


def test_the_verdict_of_a_comparison_that_passes(good):
    (row,) = good[1].sections[0].verdicts
    assert (row.subject, row.passes, row.tolerance) == ("llama-tiny under 3 systems", True, "1e-5")
    assert row.largest == "5e-6 nats per token"
    assert row.finding == (
        "The largest difference is that of fsdp2 with llama-tiny at step 2."
        " ddp and fsdp1 are bitwise equal to single with llama-tiny at every step."
    )


def test_the_verdict_of_a_failed_comparison_names_every_failure(bad):
    (row,) = bad[1].sections[0].verdicts
    assert row.passes is False
    assert row.largest == "nan nats per token"
    assert row.finding == (
        "ddp with llama-tiny exceeds its tolerance: it differs by 0.5 nats per token at step 2,"
        " and the tolerance is 1e-5. fsdp1 with llama-tiny ended with exit code 7; see"
        " llama-tiny-fsdp1.log. The loss of fsdp2 with llama-tiny is not finite from step 3 on."
    )


def test_without_a_reference_the_verdict_is_that(made_up):
    results, findings = made_up(single=None, ddp=LOSSES, fsdp2=LOSSES)
    (row,) = findings.sections[0].verdicts
    assert (row.passes, row.largest) == (False, "")
    assert row.finding == (
        "single with llama-tiny ended with exit code 7; see llama-tiny-single.log. ddp with"
        " llama-tiny and fsdp2 with llama-tiny were not compared, as single with llama-tiny failed."
    )
    losses, cost = figures(findings)
    assert [text.get_text() for text in losses.draw(LIGHT).get_axes()[1].texts][:1] == [
        "nothing to compare"
    ]
    times, *_ = cost.draw(LIGHT).get_axes()
    assert [text.get_text() for text in times.texts] == [" failed", "500", "500"]
    assert relative_times(results)["fsdp2"] == RelativeTime("ddp", 1.0)


def test_rows_have_what_was_measured(good):
    curves, speed = tables(good[1])
    single, ddp, fsdp2 = (curves[name] for name in ("single", "ddp", "fsdp2"))
    assert (single["max |Δ|"], single["tolerance"]) == (ABSENT, ABSENT)
    assert (ddp["max |Δ|"], ddp["at step"], ddp["verdict"]) == ("0", ABSENT, "bitwise equal")
    assert (fsdp2["max |Δ|"], fsdp2["at step"], fsdp2["mean |Δ|"], fsdp2["tolerance"]) == (
        *("5e-6", "2"),
        *("1.4e-6", "1e-5"),
    )
    assert (ddp["final loss"], ddp["ranks"], ddp["data-parallel"]) == ("3.000000", "2", "2")
    single, ddp = speed["single"], speed["ddp"]
    # One device takes 250 ms for two microbatches, a rank of ddp 500 ms for one of them.
    ratio = "per microbatch, relative to equal work"
    assert single[ratio] == f"1.00{TIMES} single"
    assert (ddp["step time"], ddp[ratio], ddp["tokens/s"]) == (
        "500 ms",
        f"4.00{TIMES} single",
        "1,024",
    )
    assert (ddp["peak memory, mean of ranks"], ddp["largest rank"]) == ("410 MiB", "420 MiB")
    assert (single["local microbatches"], single["GFLOP of each"]) == (f"2 {TIMES} 4", "7.72")
    assert (ddp["local microbatches"], ddp["GFLOP of each"]) == (f"1 {TIMES} 4", "7.72")
    assert single["collectives of a step"] == "none"
    assert ddp["collectives of a step"] == "4 all_gather, 2 MiB; 1 reduce_scatter, 1 MiB"


def test_only_rows_of_equal_work_have_a_ratio(good):
    single, ddp, fsdp1, fsdp2 = good[0]
    half = replace(ddp.work, microbatches=2, flops=FLOPS // 2)
    nearly = replace(half, flops=int(1.005 * FLOPS / 2))
    found = relative_times([single, ddp, replace(fsdp1, work=half), replace(fsdp2, work=nearly)])
    assert found == {
        "single": RelativeTime("single", 1.0),
        "ddp": RelativeTime("single", 4.0),
        "fsdp1": RelativeTime("fsdp1", 1.0),
        "fsdp2": RelativeTime("fsdp1", 1.0),
    }
    other = replace(half, flops=int(1.02 * FLOPS / 2))
    samples = replace(half, samples=2)
    for work in (other, samples, replace(half, flops=None)):
        found = relative_times([single, ddp, replace(fsdp1, work=half), replace(fsdp2, work=work)])
        assert list(found) == ["single", "ddp"]
    # Bars name no other system: they have ratios to the first alone.
    results = [single, ddp, replace(fsdp1, work=half), replace(fsdp2, work=half)]
    texts = [text.get_text() for text in draw_cost(results, LIGHT).get_axes()[0].texts]
    assert texts == [f"250   1.00{TIMES}", f"500   4.00{TIMES}", "500", "500"]


def test_a_failed_row_has_no_numbers(bad):
    curves, speed = (table["fsdp1"] for table in tables(bad[1]))
    assert curves["verdict"] == "failed"
    assert {curves["final loss"], curves["max |Δ|"], speed["step time"]} == {ABSENT}
    assert {speed["local microbatches"], speed["GFLOP of each"]} == {ABSENT}
    assert bad[0][2].failure.tail == "Traceback: <broken> & gone"


def test_where_no_products_were_counted_a_row_has_the_microbatches_alone(good):
    results = [replace(each, work=replace(each.work, flops=None)) for each in good[0]]
    own = SystemOptions(systems="ddp", models="llama-tiny", steps=5)
    setting = EXPERIMENT.setting(SharedOptions(), own)
    row = tables(EXPERIMENT.report(setting, results))[1]["ddp"]
    assert (row["local microbatches"], row["GFLOP of each"]) == (f"1 {TIMES} 4", ABSENT)


def test_every_form_of_the_report_shows_the_local_work_in_eighty_columns(good, tmp_path, capsys):
    results, findings = good
    report = ReportPage("report", tuple(findings.sections))
    markdown, html = render_markdown(report), render_html(report)
    print_report(report, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("passes:")[0].splitlines())) <= 80
    facts = {
        each["system"]: each for each in ExperimentResults("", results, findings).facts()["runs"]
    }
    for system, count in (("single", 2), ("ddp", 1), ("fsdp2", 1)):
        cells = f"{count} {TIMES} 4"
        assert f"| {system} | {cells} | 7.72 |" in markdown
        assert len(re.findall(rf"^\| {system} \|", markdown, re.MULTILINE)) == 2
        assert cells in html
        assert re.search(rf"^{system} +{cells} +7.72 ", printed, re.MULTILINE)
        work = facts[system]["work"]
        assert work == {"microbatches": count, "samples": 4, "flops": FLOPS}
    assert re.search(r"^fsdp2 +within tolerance +5e-6", printed, re.MULTILINE)
    json.dumps(facts, default=str)


def test_a_system_that_cannot_run_here_is_named_and_left_out(made_up, monkeypatch):
    monkeypatch.setattr(type(get_variant("fsdp2").make()), "missing", "not installed: do that")
    results, findings = made_up(ddp=LOSSES, fsdp2=LOSSES, single=LOSSES)
    assert [each.system for each in results] == ["single", "ddp"]
    (_, missing) = findings.sections[0].verdicts
    assert (missing.passes, missing.finding) == (None, "fsdp2 is not installed: do that.")


def is_tolerance(line):
    return list(line.get_xdata()) == [0, 1]


def test_the_loss_figure_shows_every_curve_and_every_zero(good):
    losses, differences = figures(good[1])[0].draw(LIGHT).get_axes()
    names = [text.get_text() for text in losses.get_legend().get_texts()]
    assert names == ["single", "ddp", "fsdp1", "fsdp2"]
    assert [list(line.get_ydata()) for line in losses.get_lines()] == [*[LOSSES] * 3, SHIFTED]
    assert "0 (bitwise\nequal)" in [label.get_text() for label in differences.get_yticklabels()]
    bottom, top = differences.get_ylim()
    lines = [line for line in differences.get_lines() if len(line.get_xdata())]
    lines = [line for line in lines if not is_tolerance(line)]
    shown = [y for line in lines for y in line.get_ydata() if math.isfinite(y)]
    # 15 points of three systems: none is lost for being zero, and none is outside of the axes.
    assert len(shown) == 15
    assert all(bottom < y < top for y in shown)
    below = [y for y in shown if y < 1e-6]
    assert len(below) == 13
    assert len(set(below)) == 3, "each system's zeros have a row of their own"
    assert [line.get_ydata()[0] for line in differences.get_lines() if is_tolerance(line)] == [1e-5]


def test_the_loss_figure_survives_what_is_not_finite_and_what_failed(bad):
    losses, differences = figures(bad[1])[0].draw(LIGHT).get_axes()
    names = [text.get_text() for text in losses.get_legend().get_texts()]
    assert names == ["single", "ddp", "fsdp1 (failed)", "fsdp2"]
    assert "not finite" in [text.get_text() for text in differences.texts]


def test_the_bars_are_the_medians_and_the_means(good):
    times, memory, collectives = draw_cost(good[0], LIGHT).get_axes()
    assert [bar.get_width() for bar in times.patches] == [250, 500, 500, 500]
    assert [bar.get_width() for bar in memory.patches] == [400, 410, 410, 410]
    assert [text.get_text() for text in times.texts][1] == f"500   4.00{TIMES}"
    # Of one device nothing was counted; a rank's calls and bytes are summed over their kinds.
    assert [bar.get_width() for bar in collectives.patches] == [0, 3, 3, 3]
    assert [text.get_text() for text in collectives.texts] == ["none", *["3 in 5"] * 3]
    assert svg_of(draw_cost(good[0], LIGHT)) != svg_of(draw_cost(good[0], DARK))


def test_models_have_figures_tables_and_verdicts_of_their_own(made_up):
    results, findings = made_up(
        models="llama-tiny,dit-tiny", single=LOSSES, ddp=LOSSES, fsdp2=SHIFTED
    )
    models = list(by_model(results))
    assert models == ["llama-tiny", "dit-tiny"]
    assert [each.name for each in figures(findings)] == [
        f"{kind}-{model}" for kind in ("losses", "cost") for model in models
    ]
    llama, dit = findings.sections[0].verdicts
    assert llama.largest.startswith("5e-6 nats per token")
    assert dit.largest.startswith("5e-6 squared error per pixel")
    bars = draw_cost(by_model(results)["dit-tiny"], LIGHT).axes[0].patches
    colours = [style_of(name, LIGHT).colour for name in ("single", "ddp", "fsdp2")]
    assert len(set(colours)) == len(bars) == 3


def test_deviation_is_what_the_figures_draw(good):
    assert good[0][3].verdict is Verdict.WITHIN
    assert good[0][3].deviation == good[0][3].whole == deviation(SHIFTED, LOSSES)
