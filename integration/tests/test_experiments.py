"""Experiments are found in their folder: adding one is adding one file."""

import sys

import pytest

from integration.compare.experiments import discover
from integration.compare.options import CompareOptions, parse_options
from integration.compare.report import find
from integration.compare.result import compare_runs
from integration.compare.runner import Outcome
from integration.compare.setup import prepare
from integration.errors import UsageError

DEMONSTRATION = '''
"""Gradient clipping under DDP against one device."""

from dataclasses import dataclass

from integration.compare.experiment import Experiment, Findings
from integration.compare.rows import MAXIMUM, SYSTEM, VERDICT, results_table, verdict_row
from integration.compare.run import Run
from integration.compare.variants import get_variant
from integration.report.section import Section


@dataclass(frozen=True)
class ClipOptions:
    """The options of the comparison of clipping."""

    norm: float = 0.5
    """Total norm."""


def _runs(setting):
    for system in ("single", "ddp"):
        choices = {"model": "llama-tiny", "steps": 3, "clip_grad_norm": setting.own.norm}
        yield Run(
            job=setting.job(system, get_variant(system).choices | choices),
            title=system,
            tolerance=1e-5,
            reference=None if system == "single" else "single",
        )


def _report(setting, results):
    table = results_table(results, SYSTEM, VERDICT, MAXIMUM, title="Clipping")
    verdict = verdict_row("clipping", results)
    return Findings([Section("Clipping", (table,), (verdict,))], {"norm": setting.own.norm})


EXPERIMENT = Experiment("clipping", 2.5, ClipOptions(), ClipOptions(norm=2.0), _runs, _report)
'''
NAMES = ["systems", "random_numbers", "optimizers", "parallelism", "diffusion"]


@pytest.fixture
def known(tmp_path, monkeypatch):
    """The experiments of a package that has one file more."""
    folder = tmp_path / "more_experiments"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "clipping.py").write_text(DEMONSTRATION)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield (*discover(), *discover([str(folder)], "more_experiments"))
    for name in [name for name in sys.modules if name.startswith("more_experiments")]:
        del sys.modules[name]


def test_every_file_of_the_folder_is_an_experiment_in_order():
    assert [each.name for each in discover()] == NAMES
    assert len({each.option_prefix for each in discover()}) == len(NAMES)


def test_a_file_more_is_an_experiment_with_options_runs_and_a_section(known, tmp_path):
    line = ["--experiments", "clipping", "--clipping.norm", "0.25", "--out", str(tmp_path / "out")]
    options = parse_options(line, known)
    comparison = prepare(options)
    assert [job.config.clip_grad_norm for job in comparison.jobs] == [0.25, 0.25]
    assert {job.folder.parent for job in comparison.jobs} == {tmp_path / "out/runs/clipping"}
    assert parse_options(["full"], known).own["clipping"].norm == 2.0
    assert parse_options(options.command_line(), known) == options
    (prepared,) = comparison.experiments
    failed = compare_runs(prepared.runs, [Outcome(job, 1) for job in comparison.jobs])
    found = find(prepared, failed)
    assert not found.passes
    assert [section.title for section in found.findings.sections] == ["Clipping"]
    assert found.facts()["norm"] == 0.25
    assert [run["verdict"] for run in found.facts()["runs"]] == ["failed", "failed"]


def test_experiments_are_selected_by_name_and_run_in_their_order():
    options = CompareOptions(experiments="diffusion, systems")
    assert [each.name for each in options.selected()] == ["systems", "diffusion"]
    assert [each.name for each in CompareOptions().selected()] == NAMES


@pytest.mark.parametrize("names", ["", ",", "systems,nope"])
def test_unknown_experiments_are_refused(names):
    with pytest.raises(UsageError, match=r"--experiments: expected some of systems, random_numb"):
        CompareOptions(experiments=names).selected()


def test_options_of_experiments_that_do_not_run_do_not_matter(tmp_path):
    line = ["--experiments", "diffusion", "--optimizers.model", "nope", "--systems", ""]
    comparison = prepare(parse_options([*line, "--out", str(tmp_path / "out")]))
    assert [each.experiment.name for each in comparison.experiments] == ["diffusion"]
