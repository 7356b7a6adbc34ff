"""The comparison of optimizers: its jobs, what runs made up here come to, and what is said."""

import importlib.util
import json
import re

import pytest
from rich.console import Console

from integration.compare.optimizer_jobs import optimizer_jobs
from integration.compare.options import CompareOptions
from integration.compare.results import Results, Verdict, collect_optimizers, write_results
from integration.compare.runner import Outcome
from integration.compare.setup import Comparison, DataFacts
from integration.errors import UsageError
from integration.metrics import MetricsFile, RunSummary, StepRecord, write_summary
from integration.report.comparison import write_report
from integration.report.comparison_terminal import print_results
from integration.report.optimizer_figure import draw_optimizers
from integration.report.optimizer_text import optimizer_finding, optimizer_rows
from integration.report.palette import DARK, LIGHT
from integration.train.config import parse_config

LOSSES = [5.0, 4.0, 3.5]
CLOSE = [5.0, 4.000002, 3.5]
FAR = [5.0, 4.5, 3.5]


def made_up(out, **changes):
    """All runs, equal under both systems; ``changes`` are losses by name, None of a failed run."""
    jobs = optimizer_jobs(CompareOptions(out=out, optimizer_steps=len(LOSSES)))
    outcomes = []
    for job in (job for each in jobs for job in each.jobs):
        losses = changes.get(job.name, LOSSES)
        write_run(job, losses or LOSSES[:1])
        outcomes.append(Outcome(job, 0 if losses else 7))
    return jobs, collect_optimizers(jobs, outcomes)


def write_run(job, losses):
    job.folder.mkdir(parents=True)
    job.log.write_text("Traceback: <broken> & gone\n")
    metrics = MetricsFile(job.folder, keep_steps=0)
    for step, loss in enumerate(losses, start=1):
        metrics.append(StepRecord(step=step, loss=loss, seconds=0.5, tokens=512))
    metrics.close()
    summary = RunSummary(
        system=job.system,
        model="llama-tiny",
        parameters=115008,
        world_size=job.ranks,
        data_parallel_degree=job.ranks,
        accumulation=1,
        micro_batch=4,
        steps=len(losses),
        data_source="text",
        peak_rss_bytes=[2**20] * job.ranks,
    )
    write_summary(job.folder, summary)


def whole(out, **changes):
    """A comparison that was of optimizers only, and its results."""
    jobs, results = made_up(out, **changes)
    options = CompareOptions(out=out, systems="ddp")
    systems = results[0].runs
    asked = Comparison(options, jobs[0].jobs, (), (DataFacts("text", 1, "abc"),), jobs)
    return asked, Results(systems, (), results)


def test_each_optimizer_runs_under_ddp_and_sharded_with_equal_batches(tmp_path):
    given = CompareOptions(out=tmp_path, optimizer_steps=7, seed=3, learning_rate=3e-4)
    found = [
        (each.optimizer, parse_config(job.arguments), job)
        for each in optimizer_jobs(given)
        for job in each.jobs
    ]
    assert [(name, config.system, config.ranks) for name, config, _ in found] == [
        (name, system, 2) for name in ("adam8bit", "muon") for system in ("ddp", "fsdp")
    ]
    for name, config, job in found:
        assert (config.optimizer, config.model, config.steps) == (name, "llama-tiny", 7)
        assert (config.seed, config.learning_rate, config.resume) == (3, 3e-4, "never")
        assert config.out == tmp_path / "runs" / "optimizers" / f"{name}-{job.system}"
        assert job.tolerance == 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer_steps": 0}, r"--optimizer-steps is 0"),
        ({"optimizer_model": "nope"}, r"unknown model 'nope'"),
    ],
    ids=["steps", "model"],
)
def test_bad_options_are_refused_and_do_not_matter_where_it_is_left_out(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        optimizer_jobs(CompareOptions(out=tmp_path, **change))
    assert optimizer_jobs(CompareOptions(out=tmp_path, optimizers=False, **change)) == ()


def test_a_missing_fsdp_is_refused_with_the_option_to_leave_it_out(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package fsdp.* --no-optimizers"):
        optimizer_jobs(CompareOptions(out=tmp_path))


def test_each_run_is_compared_with_that_of_its_own_optimizer(tmp_path):
    changes = {"muon-ddp": FAR, "muon-fsdp": FAR, "adam8bit-fsdp": CLOSE}
    _, (adam, muon) = made_up(tmp_path, **changes)
    assert [run.verdict for run in adam.runs] == [Verdict.REFERENCE, Verdict.WITHIN]
    assert [run.verdict for run in muon.runs] == [Verdict.REFERENCE, Verdict.EQUAL]
    assert Results((), (), (adam, muon)).passes
    assert optimizer_finding((adam, muon)) == (
        "With 8-bit Adam, fsdp stays within 2e-6 nats per token of ddp. With Muon, fsdp is bitwise"
        " equal to ddp."
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"muon-fsdp": FAR},
            "fsdp with Muon exceeds its tolerance: it differs by 0.5 nats per token at step 2,"
            " and the tolerance is 1e-5.",
        ),
        (
            {"muon-fsdp": None},
            "fsdp with Muon ended with exit code 7; see muon-fsdp.log.",
        ),
        (
            {"muon-ddp": None},
            "ddp with Muon ended with exit code 7; see muon-ddp.log. fsdp with Muon was not"
            " compared, as ddp failed.",
        ),
    ],
    ids=["far", "failed", "no reference"],
)
def test_trouble_fails_the_comparison_and_is_named_first(tmp_path, changes, sentence):
    _, results = made_up(tmp_path, **changes)
    assert not Results((), (), results).passes
    assert optimizer_finding(results) == (
        f"{sentence} With 8-bit Adam, fsdp is bitwise equal to ddp."
    )


def test_the_results_file_holds_every_run(tmp_path):
    _, results = made_up(tmp_path, **{"muon-fsdp": FAR})
    write_results(tmp_path / "results.json", Results((), (), results), {})
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["passes"] is False
    adam, muon = found["optimizers"]
    assert (adam["optimizer"], muon["optimizer"]) == ("adam8bit", "muon")
    assert [run["records"][1]["loss"] for run in muon["runs"]] == [4.0, 4.5]


def test_the_figure_has_a_column_for_each_optimizer(tmp_path):
    _, results = made_up(tmp_path, **{"muon-fsdp": CLOSE})
    for theme in (LIGHT, DARK):
        losses, others, differences, last = draw_optimizers(results, theme).get_axes()
        assert losses.get_title(loc="left").startswith("8-bit Adam: loss")
        assert others.get_title(loc="left").startswith("Muon: loss")
        for axes in (losses, others):
            assert [line.get_label() for line in axes.get_lines()] == ["ddp", "fsdp"]
        assert list(others.get_lines()[1].get_ydata()) == CLOSE
        assert differences.get_ylim() == last.get_ylim()
        assert max(last.get_lines()[0].get_ydata()[1:2]) == pytest.approx(2e-6)


def test_the_pages_hold_the_section_and_only_where_it_ran(tmp_path):
    asked, results = whole(tmp_path)
    html = write_report(asked, results, []).read_text()
    page = (tmp_path / "report.md").read_text()
    assert "<h2>Optimizers</h2>" in html
    assert "With Muon, fsdp is bitwise equal to ddp." in html
    assert len(re.findall(r"<td>(?:8-bit Adam|Muon)</td>", html)) == 4
    assert (tmp_path / "figures" / "optimizers.png").read_bytes().startswith(b"\x89PNG")
    lines = re.findall(r"^\| (?:8-bit Adam|Muon) \|.*\|$", page, re.MULTILINE)
    assert len(lines) == len(optimizer_rows(results.optimizers)) == 4
    assert len({line.count("|") for line in lines}) == 1
    without = write_report(asked, Results(results.systems, ()), []).read_text()
    assert "<h2>Optimizers</h2>" not in without
    assert "## Optimizers" not in (tmp_path / "report.md").read_text()


def test_a_failed_run_is_shown_with_its_log(tmp_path):
    html = write_report(*whole(tmp_path, **{"muon-fsdp": None}), []).read_text()
    assert "<h2>muon-fsdp failed</h2>" in html
    assert "Does not pass" in html


def test_the_terminal_has_a_line_per_run_in_eighty_columns(tmp_path, capsys):
    _, results = whole(tmp_path, **{"muon-fsdp": CLOSE})
    print_results(results, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed if line.startswith(("8-bit Adam", "Muon"))]
    assert len(rows) == 4
    assert rows[-1] == ["Muon", "fsdp", "within", "tolerance", "2e-6", "3.500000"]
