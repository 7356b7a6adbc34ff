"""The experiment on optimizers: its runs, and the findings on runs made up here."""

import importlib.util

import pytest
from rich.console import Console

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.optimizers import EXPERIMENT, OptimizerOptions
from integration.compare.result import Verdict
from integration.errors import UsageError
from integration.report.markdown import render_markdown
from integration.report.palette import DARK, LIGHT
from integration.report.section import Figure, ReportPage
from integration.report.terminal import print_report
from integration.train.config import parse_config

LOSSES = [5.0, 4.0, 3.5]
CLOSE = [5.0, 4.000002, 3.5]
FAR = [5.0, 4.5, 3.5]


@pytest.fixture
def made_up(made_up_results, tmp_path):
    """Equal runs under both systems; keywords are losses by name, None of a failed run."""

    def results(**changes):
        def describe(run):
            losses = changes.get(run.job.name, LOSSES)
            return {"losses": losses} if losses else {"losses": LOSSES[:1], "exit": 7}

        own = OptimizerOptions(steps=len(LOSSES))
        setting, results = made_up_results(EXPERIMENT, own, tmp_path, describe)
        (section,) = EXPERIMENT.report(setting, results).sections
        return results, section

    return results


def runs(out, *, own=EXPERIMENT.quick, **shared):
    return EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(out=out, **shared), own))


def test_each_optimizer_runs_under_ddp_and_sharded_with_equal_batches(tmp_path):
    found = runs(tmp_path, own=OptimizerOptions(steps=7), seed=3, learning_rate=3e-4)
    configs = [(run, parse_config(run.job.arguments)) for run in found]
    assert [(config.optimizer, config.system, config.ranks) for _, config in configs] == [
        (name, system, 2) for name in ("adam8bit", "muon") for system in ("ddp", "fsdp")
    ]
    for run, config in configs:
        name = run.labels["optimizer"]
        assert (config.optimizer, config.model, config.steps) == (name, "llama-tiny", 7)
        assert (config.seed, config.learning_rate, config.resume) == (3, 3e-4, "never")
        assert config.out == tmp_path / "runs" / "optimizers" / f"{name}-{config.system}"
        assert run.tolerance == 1e-5


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (OptimizerOptions(steps=0), r"--optimizers\.steps is 0"),
        (OptimizerOptions(model="nope"), r"unknown model 'nope'"),
    ],
    ids=["steps", "model"],
)
def test_bad_options_are_refused(tmp_path, own, message):
    with pytest.raises(UsageError, match=message):
        runs(tmp_path, own=own)


def test_a_missing_fsdp_is_refused_with_the_option_to_leave_it_out(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package fsdp.* --experiments"):
        runs(tmp_path)


def test_each_run_is_compared_with_that_of_its_own_optimizer(made_up):
    changes = {"muon-ddp": FAR, "muon-fsdp": FAR, "adam8bit-fsdp": CLOSE}
    results, section = made_up(**changes)
    assert [each.verdict for each in results] == [
        *(Verdict.REFERENCE, Verdict.WITHIN),
        *(Verdict.REFERENCE, Verdict.EQUAL),
    ]
    adam, muon = section.verdicts
    assert (adam.passes, adam.largest, adam.tolerance) == (
        True,
        "2e-6 nats per token",
        "1e-5",
    )
    assert adam.finding == "The largest difference is that of fsdp with 8-bit Adam at step 2."
    assert (muon.passes, muon.largest) == (True, "0 nats per token")
    assert muon.finding == "fsdp is bitwise equal to ddp with Muon at every step."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"muon-fsdp": FAR},
            "fsdp with Muon exceeds its tolerance: it differs by 0.5 nats per token at step 2,"
            " and the tolerance is 1e-5.",
        ),
        ({"muon-fsdp": None}, "fsdp with Muon ended with exit code 7; see muon-fsdp.log."),
        (
            {"muon-ddp": None},
            "ddp with Muon ended with exit code 7; see muon-ddp.log. fsdp with Muon was not"
            " compared, as ddp with Muon failed.",
        ),
    ],
    ids=["far", "failed", "no reference"],
)
def test_trouble_fails_the_verdict_of_its_optimizer_and_is_named(made_up, changes, sentence):
    _, section = made_up(**changes)
    adam, muon = section.verdicts
    assert (adam.passes, muon.passes) == (True, False)
    assert muon.finding == sentence


def test_the_figure_has_a_column_for_each_optimizer(made_up):
    _, section = made_up(**{"muon-fsdp": CLOSE})
    (figure,) = (each for each in section.contents if isinstance(each, Figure))
    for theme in (LIGHT, DARK):
        losses, others, differences, last = figure.draw(theme).get_axes()
        assert losses.get_title(loc="left").startswith("8-bit Adam: loss")
        assert others.get_title(loc="left").startswith("Muon: loss")
        for axes in (losses, others):
            assert [line.get_label() for line in axes.get_lines()] == ["ddp", "fsdp"]
        assert list(others.get_lines()[1].get_ydata()) == CLOSE
        assert differences.get_ylim() == last.get_ylim()
        assert max(last.get_lines()[0].get_ydata()[1:2]) == pytest.approx(2e-6)


def test_the_table_has_a_row_per_run_and_fits_eighty_columns(made_up, tmp_path, capsys):
    _, section = made_up(**{"muon-fsdp": CLOSE})
    report = ReportPage("report", (section,))
    lines = [
        line
        for line in render_markdown(report).splitlines()
        if line.startswith(("| 8-bit Adam |", "| Muon |"))
    ]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    print_report(report, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed if line.startswith(("8-bit Adam", "Muon"))]
    assert len(rows) == 4
    assert rows[-1] == ["Muon", "fsdp", "within", "tolerance", "2e-6", "3.500000"]
