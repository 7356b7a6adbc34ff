"""What the report says and shows, from results made up here."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from rich.console import Console

from integration.compare.deviation import deviation
from integration.compare.options import CompareOptions
from integration.compare.results import Results, Verdict, collect
from integration.compare.runner import Outcome
from integration.compare.setup import Comparison, DataFacts
from integration.compare.training_job import TrainingJob
from integration.metrics import CollectiveCount, MetricsFile, RunSummary, StepRecord, write_summary
from integration.report.comparison import write_report
from integration.report.comparison_terminal import print_results
from integration.report.cost_figure import draw_cost
from integration.report.environment import describe_environment
from integration.report.figures import svg_of
from integration.report.formatting import ABSENT, TIMES, scientific
from integration.report.loss_figure import draw_losses
from integration.report.page_text import finding
from integration.report.palette import DARK, LIGHT
from integration.report.system_rows import rows, styles

COLLECTIVES = [
    CollectiveCount("all_gather", 4, 2 * 2**20),
    CollectiveCount("reduce_scatter", 1, 2**20),
]
FLOPS = 7_723_000_000  # of a microbatch
LOSSES = [5.0, 4.0, 3.5, 3.25, 3.0]
SHIFTED = [5.0, 4.00002, 3.5, 3.24999, 3.0]
LOST = [5.0, 4.0, math.nan, math.inf, 3.0]
FAR = [5.0, 4.5, 3.5, 3.25, 3.0]


def made_up(out, **curves):
    """A comparison with these curves, as (comparison, results); None is a run that failed."""
    jobs, outcomes = [], []
    for system, losses in curves.items():
        ranks = 1 if system == "single" else 2
        folder = out / "runs" / system
        folder.mkdir(parents=True)
        log = folder.with_suffix(".log")
        log.write_text("Traceback: <broken> & gone\n")
        arguments = ("--system", system)
        job = TrainingJob(
            *(system, ranks, 1e-4, len(LOSSES), folder, log, arguments), model="llama-tiny"
        )
        jobs.append(job)
        outcomes.append(Outcome(job, 0 if losses else 7))
        write_run(folder, system, ranks, losses or LOSSES[:2])
    options = CompareOptions(systems=",".join(curves), out=out, models="llama-tiny", steps=5)
    data = (DataFacts("some text", 12345, "abc123"),)
    return Comparison(options, tuple(jobs), (), data), collect(outcomes)


def write_run(folder, system, ranks, losses):
    metrics = MetricsFile(folder, keep_steps=0)
    for step, loss in enumerate(losses, start=1):
        metrics.append(StepRecord(step=step, loss=loss, seconds=0.25 * ranks, tokens=512))
    metrics.close()
    summary = RunSummary(
        system=system,
        model="llama-tiny",
        parameters=115008,
        world_size=ranks,
        data_parallel_degree=ranks,
        accumulation=2 // ranks,
        micro_batch=4,
        steps=len(losses),
        data_source="some text",
        peak_rss_bytes=[2**20 * (400 + 20 * rank) for rank in range(ranks)],
        collectives=COLLECTIVES if ranks > 1 else [],
        product_flops=FLOPS * 2 // ranks,
    )
    write_summary(folder, summary)


@pytest.fixture
def good(tmp_path):
    return made_up(tmp_path, single=LOSSES, ddp=LOSSES, fsdp1=LOSSES, fsdp2=SHIFTED)


@pytest.fixture
def bad(tmp_path):
    return made_up(tmp_path, single=LOSSES, ddp=FAR, fsdp1=None, fsdp2=LOST)


def test_the_finding_of_a_comparison_that_passes(good):
    assert finding(good[1]) == (
        "With llama-tiny, fsdp2 is within 1e-4 of the single device; the largest difference is"
        " 2e-5 nats per token (step 2). With llama-tiny, ddp and fsdp1 are bitwise equal to the"
        " single device at every step."
    )


def test_the_finding_of_a_failed_comparison_names_every_failure(bad):
    assert finding(bad[1]) == (
        "ddp with llama-tiny exceeds its tolerance: it differs by 0.5 nats per token at step 2,"
        " and the tolerance is 1e-4. fsdp1 with llama-tiny ended with exit code 7; see fsdp1.log."
        " The loss of fsdp2 with llama-tiny is not finite from step 3 on."
    )


def test_without_a_reference_the_finding_is_that(tmp_path):
    _, results = made_up(tmp_path, single=None, ddp=LOSSES)
    assert finding(results) == (
        "The reference run of llama-tiny, single, ended with exit code 7; its other runs"
        " were not compared."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-4, "1e-4"), (3.14e-6, "3.1e-6"), (0.5, "0.5"), (2.0, "2"), (120.0, "120")],
)
def test_differences_are_short(value, text):
    assert scientific(value) == text
    assert scientific(math.nan) == "nan"


def test_a_row_says_what_was_measured(good):
    single, ddp, _, fsdp2 = rows(good[1])
    assert (single.maximum, single.tolerance, single.relative) == (ABSENT, ABSENT, f"1.00{TIMES}")
    assert (ddp.maximum, ddp.step, ddp.verdict) == ("0", ABSENT, Verdict.EQUAL)
    assert (fsdp2.maximum, fsdp2.step, fsdp2.mean, fsdp2.tolerance) == (
        *("2e-5", "2"),
        *("6e-6", "1e-4"),
    )
    assert (ddp.step_time, ddp.relative, ddp.tokens_per_second) == (
        "500 ms",
        f"2.00{TIMES}",
        "1,024",
    )
    assert (ddp.memory_mean, ddp.memory_max) == ("410 MiB", "420 MiB")
    assert (single.microbatches, single.gigaflops) == (f"2 {TIMES} 4", "7.72")
    assert (ddp.microbatches, ddp.gigaflops) == (f"1 {TIMES} 4", "7.72")
    assert single.collectives == "none"
    assert ddp.collectives == "4 all_gather, 2 MiB; 1 reduce_scatter, 1 MiB"


def test_a_failed_row_has_no_numbers(bad):
    failed = rows(bad[1])[2]
    assert failed.verdict is Verdict.FAILED
    assert {failed.final_loss, failed.maximum, failed.step_time, failed.memory_mean} == {ABSENT}
    assert {failed.microbatches, failed.gigaflops} == {ABSENT}


def test_where_no_products_were_counted_a_row_has_the_microbatches_alone(good):
    work = replace(good[1][1].work, flops=None)
    (row,) = rows([replace(good[1][1], work=work)])
    assert (row.microbatches, row.gigaflops) == (f"1 {TIMES} 4", ABSENT)


def test_every_form_of_the_report_shows_the_local_work(good, capsys):
    comparison, results = good
    html = write_report(comparison, Results(results, ()), [])
    print_results(Results(results, ()), html, Console(width=80))
    printed = capsys.readouterr().out
    markdown = (html.parent / "report.md").read_text()
    shown = Resources(html.read_text()).rows
    found = json.loads((html.parent / "results.json").read_text())["systems"]
    for system, count in (("single", 2), ("ddp", 1), ("fsdp2", 1)):
        cells = f"{count} {TIMES} 4"
        assert f"| {system} | {cells} | 7.72 |" in markdown
        assert [system + cells + "7.72" in row.replace("\n", "") for row in shown].count(True) == 1
        assert re.search(rf"^{system} .* {cells} +7.72 ", printed, re.MULTILINE)
        (work,) = (each["work"] for each in found if each["system"] == system)
        assert work == {"microbatches": count, "samples": 4, "flops": FLOPS}


class Resources(HTMLParser):
    """Collects every address in an HTML page, and the text of its table rows."""

    def __init__(self, page):
        super().__init__()
        self.addresses, self.open, self.rows = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.addresses += [
            value for name, value in attrs if name in ("src", "srcset", "href", "data", "action")
        ]
        if tag not in ("meta", "img", "source", "br", "link"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open:
            self.rows[-1] += data


@pytest.mark.parametrize("which", ["good", "bad"])
def test_the_html_is_whole_and_loads_nothing(which, request):
    comparison, results = request.getfixturevalue(which)
    page = write_report(comparison, Results(results, ()), ["--steps", "5"]).read_text()
    found = Resources(page)
    assert found.open == []
    assert len(found.addresses) == 4
    assert all(address.startswith("data:image/svg+xml;base64,") for address in found.addresses)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    for result in results:
        lines = [row for row in found.rows if row.startswith(result.system)]
        assert len(lines) == 2
        assert result.verdict in lines[0]


def test_the_html_shows_a_failed_run_with_its_log_escaped(bad):
    comparison, results = bad
    page = write_report(comparison, Results(results, ()), []).read_text()
    assert "Does not pass" in page
    assert "<h2>fsdp1 failed</h2>" in page
    assert "Traceback: &lt;broken&gt; &amp; gone" in page


def test_the_markdown_refers_to_figures_that_exist(good):
    comparison, results = good
    out = write_report(comparison, Results(results, ()), ["--steps", "5"]).parent
    page = (out / "report.md").read_text()
    figures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert figures == ["figures/losses-llama-tiny.png", "figures/cost-llama-tiny.png"]
    for figure in figures:
        assert (out / figure).read_bytes().startswith(b"\x89PNG")
    assert "**Passes.** With llama-tiny, fsdp2 is within" in page
    for result in results:
        assert len(re.findall(rf"^\| {result.system} \|", page, re.MULTILINE)) == 2
    assert "python -m integration.compare --steps 5" in page
    assert "python -m integration.train --system fsdp2" in page
    assert not re.search(r"https?://", page)


def test_the_markdown_shows_the_log_of_a_failed_run(bad):
    comparison, results = bad
    page = (write_report(comparison, Results(results, ()), []).parent / "report.md").read_text()
    assert "## fsdp1 failed" in page
    assert "```text\nTraceback: <broken> & gone\n```" in page


def lines_of(axes):
    return [line for line in axes.get_lines() if len(line.get_xdata()) and not is_tolerance(line)]


def is_tolerance(line):
    return list(line.get_xdata()) == [0, 1]


def test_the_loss_figure_shows_every_curve_and_every_zero(good):
    losses, differences = draw_losses(good[1], LIGHT).get_axes()
    names = [text.get_text() for text in losses.get_legend().get_texts()]
    assert names == ["single", "ddp", "fsdp1", "fsdp2"]
    assert [list(line.get_ydata()) for line in losses.get_lines()] == [
        *[LOSSES] * 3,
        SHIFTED,
    ]
    assert "0 (bitwise\nequal)" in [label.get_text() for label in differences.get_yticklabels()]
    bottom, top = differences.get_ylim()
    shown = [y for line in lines_of(differences) for y in line.get_ydata() if math.isfinite(y)]
    # 15 points of three systems: none is lost for being zero, and none is outside of the axes.
    assert len(shown) == 15
    assert all(bottom < y < top for y in shown)
    below = [y for y in shown if y < 9e-6]
    assert len(below) == 13
    assert len(set(below)) == 3, "each system's zeros have a row of their own"
    assert [line.get_ydata()[0] for line in differences.get_lines() if is_tolerance(line)] == [1e-4]


def test_the_loss_figure_survives_what_is_not_finite_and_what_failed(bad):
    losses, differences = draw_losses(bad[1], LIGHT).get_axes()
    names = [text.get_text() for text in losses.get_legend().get_texts()]
    assert names == ["single", "ddp", "fsdp1 (failed)", "fsdp2"]
    assert "not finite" in [text.get_text() for text in differences.texts]


def test_the_figures_can_show_a_comparison_without_reference(tmp_path):
    _, results = made_up(tmp_path, single=None, ddp=LOSSES)
    _, differences = draw_losses(results, LIGHT).get_axes()
    assert [text.get_text() for text in differences.texts] == ["nothing to compare"]
    times, *_ = draw_cost(results, LIGHT).get_axes()
    assert [text.get_text() for text in times.texts] == [" failed", "500"]


def test_the_bars_are_the_medians_and_the_means(good):
    times, memory, collectives = draw_cost(good[1], LIGHT).get_axes()
    assert [bar.get_width() for bar in times.patches] == [250, 500, 500, 500]
    assert [bar.get_width() for bar in memory.patches] == [400, 410, 410, 410]
    assert [text.get_text() for text in times.texts][1] == f"500   2.00{TIMES}"
    # Of one device nothing was counted; a rank's calls and bytes are summed over their kinds.
    assert [bar.get_width() for bar in collectives.patches] == [0, 3, 3, 3]
    assert [text.get_text() for text in collectives.texts] == ["none", *["3 in 5"] * 3]


def test_no_two_systems_look_alike_and_the_themes_differ(good):
    for theme in (LIGHT, DARK):
        drawn = styles(good[1], theme)
        assert len({(style.colour, style.marker) for style in drawn.values()}) == 4
    assert svg_of(draw_cost(good[1], LIGHT)) != svg_of(draw_cost(good[1], DARK))


def test_the_environment_names_what_decides_a_result(good):
    comparison, _ = good
    environment = describe_environment(comparison, ["--steps", "5", "--data", "my text"])
    assert environment.command == "python -m integration.compare --steps 5 --data 'my text'"
    labels = [label for label, _ in environment.facts()]
    for label in ("date", "git commit", "torch", "transformers", "Python", "CPU", "cores"):
        assert label in labels
    assert all(value for _, value in environment.facts())
    assert environment.data == "some text: 12,345 bytes, SHA-256 abc123"


def test_models_have_figures_and_tables_of_their_own_and_systems_one_colour(tmp_path):
    comparison, llama = made_up(tmp_path, single=LOSSES, ddp=LOSSES, fsdp2=SHIFTED)
    dit = [replace(each, model="dit-tiny") for each in llama if each.system != "ddp"]
    results = Results([*llama, *dit], ())
    page = write_report(
        replace(comparison, missing={"zero": "not installed: do that"}), results, []
    )
    text = page.read_text()
    markdown = page.with_name("report.md").read_text()
    for kind in ("losses", "cost"):
        for model in ("llama-tiny", "dit-tiny"):
            assert f"(figures/{kind}-{model}.png)" in markdown
            assert (tmp_path / "figures" / f"{kind}-{model}.png").exists()
    assert len(re.findall(r"^\| fsdp2 \|", markdown, re.MULTILINE)) == 4
    assert "in squared error per pixel." in markdown
    assert "zero is not installed: do that." in markdown
    assert "zero is not installed: do that." in text
    assert "With dit-tiny, fsdp2 is within 1e-4 of the single device" in markdown
    assert styles(results.systems, LIGHT) == styles(llama, LIGHT)
    colours = [
        bar.get_facecolor() for bar in draw_cost(dit, LIGHT, styles(llama, LIGHT)).axes[0].patches
    ]
    assert colours[1] == draw_cost(llama, LIGHT).axes[0].patches[2].get_facecolor()


def test_the_terminal_table_fits_eighty_columns(good, capsys):
    _, results = good
    print_results(Results(results, ()), Path("there/report.html"), Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    table = [line for line in printed if line.startswith(("single", "ddp", "fsdp"))][:4]
    assert [line.split()[0] for line in table] == ["single", "ddp", "fsdp1", "fsdp2"]
    assert "within tolerance" in table[3]
    assert "2e-5" in table[3]


def test_the_templates_travel_with_the_package():
    for name in ("report.html.j2", "comparison.html.j2", "report.md.j2"):
        assert (files("integration.report") / name).is_file()


def test_deviation_is_what_the_figures_draw(good):
    assert good[1][3].deviation == deviation(SHIFTED, LOSSES)


def test_lines_of_code_are_counted_in_markdown_html_and_results(good):
    comparison, results = good
    html = write_report(comparison, Results(results, ()), [])
    table = (html.parent / "report.md").read_text().split("## Lines of code")[1]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|") == 9
    assert rows[2].startswith("| llama | plan | 0 |")
    shown, *_ = (row for row in Resources(html.read_text()).rows if "torchtitan-style" in row)
    assert shown.replace(" ", "").startswith("llamatorchtitan-style0")
    found = json.loads((html.parent / "results.json").read_text())["lines_of_code"]
    assert found[0]["counted"]["plan"] + found[0]["counted"]["model"] > 20
