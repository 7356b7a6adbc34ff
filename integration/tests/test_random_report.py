"""What the section on random numbers says and shows, from results made up here."""

import math
import re

import pytest
from rich.console import Console

from integration.compare.deviation import deviation
from integration.compare.options import CompareOptions
from integration.compare.random_jobs import RandomCase, Source, random_jobs
from integration.compare.random_numbers import RandomResult, RandomVerdict
from integration.compare.results import Results, SystemResult, Verdict
from integration.compare.run_result import Failure
from integration.compare.setup import Comparison, DataFacts
from integration.report.comparison import write_report
from integration.report.comparison_terminal import print_results
from integration.report.formatting import ABSENT
from integration.report.palette import DARK, LIGHT
from integration.report.random_figure import draw_random, source_colour
from integration.report.random_text import random_finding, random_rows

REFERENCE = [5.0, 4.0, 3.5]
DIST_RNG_RUN = "dropout-dtensor-tp-4-dist-rng"


def result(job, **changes):
    """A run as it should be, with ``changes``."""
    native, shards = job.source is Source.NATIVE, job.job.ranks > 1
    drawn = (not native) if shards else None
    by = (0.05 if native else 2e-7 * job.job.ranks) if shards else 0.0
    verdict = RandomVerdict.UNJUDGED if native else RandomVerdict.SAME
    values = {
        "case": job.case,
        "source": job.source,
        "name": job.job.name,
        "system": job.job.system,
        "ranks": job.job.ranks,
        "tolerance": 1e-5,
        "verdict": verdict if shards else RandomVerdict.REFERENCE,
        "same_weights": drawn if job.case is RandomCase.INIT or not shards else True,
        "same_masks": drawn if job.case is RandomCase.DROPOUT else None,
        "deviation": deviation([5.0, 4.0 + by, 3.5], REFERENCE) if shards else None,
        "records": (),
        "summary": None,
        "failure": None,
    }
    return RandomResult(**values | changes)


def made_up(out, **changes):
    jobs = random_jobs(CompareOptions(out=out))
    return [result(job, **changes.get(job.job.name, {})) for job in jobs]


def failed(out):
    failure = Failure(
        DIST_RNG_RUN, "ended with exit code 7", out / f"{DIST_RNG_RUN}.log", "<broken>"
    )
    change = {"verdict": RandomVerdict.FAILED, "failure": failure, "same_weights": None}
    return {DIST_RNG_RUN: change | {"same_masks": None, "deviation": None}}


def test_the_finding_has_a_sentence_per_case(tmp_path):
    assert random_finding(made_up(tmp_path)) == (
        "With random init, dist-rng on 2 and 4 ranks draws the initial weights of the single"
        " device, bit for bit, and its losses are within 8e-7 nats per token; losses with native"
        " DTensor differ by up to 0.05. With dropout, dist-rng on 2 and 4 ranks draws the dropout"
        " masks of the single device, bit for bit, and its losses are within 8e-7 nats per token;"
        " losses with native DTensor differ by up to 0.05."
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"verdict": RandomVerdict.OTHER, "same_masks": False},
            f"The dropout masks of {DIST_RNG_RUN} differ from the single device's.",
        ),
        (
            {"verdict": RandomVerdict.OTHER, "same_masks": False, "same_weights": False},
            f"The initial weights and dropout masks of {DIST_RNG_RUN} differ from the single"
            " device's.",
        ),
        (
            {"verdict": RandomVerdict.OUTSIDE, "deviation": deviation([5.0, 4.5, 3.5], REFERENCE)},
            f"{DIST_RNG_RUN} exceeds its tolerance: it differs by 0.5 nats per token at step 2,"
            " and the tolerance is 1e-5.",
        ),
        (
            {"verdict": RandomVerdict.OUTSIDE, "deviation": deviation([math.nan] * 3, REFERENCE)},
            f"The loss of {DIST_RNG_RUN} is not finite from step 1 on.",
        ),
        (
            {"verdict": RandomVerdict.UNCOMPARED, "deviation": None},
            f"{DIST_RNG_RUN} was not compared, as the run on one device failed.",
        ),
    ],
    ids=["masks", "both", "outside", "nan", "uncompared"],
)
def test_the_finding_names_failures_first_and_claims_only_what_was_observed(
    tmp_path, change, sentence
):
    found = random_finding(made_up(tmp_path, **{DIST_RNG_RUN: change}))
    assert found.startswith(sentence)
    assert "With dropout, dist-rng on 2 ranks draws the dropout masks" in found


def test_the_rows_leave_out_what_does_not_apply(tmp_path):
    rows = random_rows(made_up(tmp_path))
    assert [row.case for row in rows] == ["random init"] * 5 + ["dropout"] * 5
    single, native, dist_rng_run = rows[5:8]
    assert (single.run, single.source, single.masks) == ("single", ABSENT, ABSENT)
    assert (native.run, native.source, native.mark) == ("dtensor-tp, 2 ranks", "native", "")
    assert (native.weights, native.masks, native.tolerance) == ("equal", "differ", ABSENT)
    assert (dist_rng_run.weights, dist_rng_run.masks, dist_rng_run.tolerance) == (
        "equal",
        "equal",
        "1e-5",
    )
    assert (dist_rng_run.maximum, dist_rng_run.step) == ("4e-7", "2")
    assert {row.masks for row in rows[:5]} == {ABSENT}


def test_the_figure_shows_every_run_of_both_cases(tmp_path):
    figure = draw_random(made_up(tmp_path), LIGHT)
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


def test_the_figure_survives_runs_without_numbers(tmp_path):
    nothing = made_up(tmp_path)
    nothing = [result for result in nothing if result.verdict is RandomVerdict.REFERENCE]
    for axes in draw_random(nothing, DARK).get_axes():
        assert [text.get_text() for text in axes.texts] == ["nothing to compare"]
    draw_random(made_up(tmp_path, **failed(tmp_path)), DARK)


def test_dist_rng_and_native_do_not_look_alike():
    for theme in (LIGHT, DARK):
        colours = {source_colour(source, theme) for source in Source}
        assert len(colours) == 2
        assert theme.reference not in colours


def comparison(out, random):
    """A comparison of DDP that came to nothing but what ``random`` holds, and its results."""
    options = CompareOptions(out=out, systems="ddp")
    jobs = random_jobs(options)
    single, ddp = (
        SystemResult(name, "llama-tiny", 1, 0.0, verdict, (), None, None, None, found, None, None)
        for name, verdict, found in (
            ("single", Verdict.REFERENCE, None),
            ("ddp", Verdict.EQUAL, deviation(REFERENCE, REFERENCE)),
        )
    )
    asked = Comparison(options, (jobs[0].job, jobs[1].job), jobs, (DataFacts("text", 1, "abc"),))
    return asked, Results((single, ddp), random)


def test_the_pages_hold_the_section_and_only_where_it_ran(tmp_path):
    html = write_report(*comparison(tmp_path, made_up(tmp_path)), []).read_text()
    page = (tmp_path / "report.md").read_text()
    assert "<h2>Random numbers</h2>" in html
    assert "With dropout, dist-rng on 2 and 4 ranks" in html
    assert "<dt>dist-rng</dt>" in html
    assert len(re.findall(r"<td>(?:random init|dropout)</td>", html)) == 10
    assert html.count("✓ same numbers") == 4
    assert "![Difference from the single device by step" in page
    assert (tmp_path / "figures" / "random.png").read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^\| (?:random init|dropout) \|.*\|$", page, re.MULTILINE)
    assert len(rows) == 10
    assert len({row.count("|") for row in rows}) == 1
    without = write_report(*comparison(tmp_path, []), []).read_text()
    assert "Random numbers" not in without
    assert "Random numbers" not in (tmp_path / "report.md").read_text()


def test_a_failed_run_is_shown_with_its_log(tmp_path):
    random = made_up(tmp_path, **failed(tmp_path))
    html = write_report(*comparison(tmp_path, random), []).read_text()
    assert f"<h2>{DIST_RNG_RUN} failed</h2>" in html
    assert "&lt;broken&gt;" in html
    assert "Does not pass" in html


def test_the_terminal_table_fits_eighty_columns(tmp_path, capsys):
    _, results = comparison(tmp_path, made_up(tmp_path))
    print_results(results, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    table = [line for line in printed if line.startswith(("random init, ", "dropout, "))]
    assert len(table) == 8
    assert table[-1].split() == [
        *("dropout,", "4", "ranks", "dist-rng", "same", "numbers", "equal", "equal", "8e-7")
    ]
    assert any(line.startswith("passes: With llama-tiny, ddp is bitwise equal") for line in printed)
    assert any("With dropout, dist-rng on 2 and 4 ranks" in line for line in printed)
