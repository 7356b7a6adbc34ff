"""The comparison as a user runs it, with the real trainer."""

import json
import subprocess
import sys

import pytest

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.random_numbers import EXPERIMENT, RandomOptions
from integration.compare.result import Verdict, compare_runs
from integration.compare.runner import run_jobs

pytestmark = pytest.mark.ranks

STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of DDP with the single device, and where its results lie."""
    out = tmp_path_factory.mktemp("comparison") / "results"
    options = ["--systems", "ddp", "--models", "llama-tiny", "--steps", str(STEPS)]
    options += ["--experiments", "systems"]
    command = [sys.executable, "-m", "integration.compare", *options, "--out", str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_it_passes_and_says_so(finished):
    out, result = finished
    assert result.returncode == 0, result.stderr
    assert "passes: " in result.stdout
    assert f"report: {out / 'report.html'}" in result.stdout
    assert "llama-tiny-single: 1 rank, 6 steps" in result.stderr


def test_every_file_is_there(finished):
    out, _ = finished
    figures = [f"figures/{kind}-llama-tiny.png" for kind in ("losses", "cost")]
    for name in ("report.md", "report.html", "results.json", *figures):
        assert (out / name).stat().st_size > 0
    for name in ("single", "ddp"):
        assert (out / "runs" / "systems" / f"llama-tiny-{name}.log").exists()


def test_the_results_hold_every_step_of_both_systems(finished):
    out, _ = finished
    results = json.loads((out / "results.json").read_text())
    single, ddp = results["experiments"]["systems"]["runs"]
    assert results["passes"]
    assert [record["step"] for record in ddp["records"]] == list(range(1, STEPS + 1))
    assert single["records"][-1]["loss"] < single["records"][0]["loss"]
    assert ddp["deviation"]["maximum"] <= ddp["tolerance"] == 1e-5
    assert (ddp["ranks"], ddp["summary"]["data_parallel_degree"]) == (2, 2)
    assert len(ddp["summary"]["peak_rss_bytes"]) == 2
    # 115,008 parameters in one bucket, and the rotary frequencies, which its first rank hands out.
    assert single["summary"]["collectives"] == []
    assert ddp["summary"]["collectives"] == [
        {"kind": "broadcast", "calls": 1, "bytes": 64},
        {"kind": "all_reduce", "calls": 1, "bytes": 4 * 115008},
    ]


class Watcher:
    """Ignores the progress of jobs."""

    def started(self, job):
        pass

    def progressed(self, job, record):
        pass

    def ended(self, outcome):
        pass


class Stop:
    requested = False


def test_the_jobs_of_random_numbers_do_what_they_say(tmp_path):
    # All ten would take minutes: one case, on one device and on two ranks with dist-rng.
    chosen = ("dropout-single-1-native", "dropout-dtensor-tp-2-dist-rng")
    setting = EXPERIMENT.setting(SharedOptions(out=tmp_path), RandomOptions(steps=3))
    runs = [run for run in EXPERIMENT.runs(setting) if run.job.name in chosen]
    outcomes = run_jobs([run.job for run in runs], Watcher(), Stop())
    single, sharded = compare_runs(runs, outcomes)
    assert sharded.failure is None, sharded.failure
    assert single.verdict is Verdict.REFERENCE
    assert sharded.verdict is Verdict.SAME
    assert sharded.equal == {"initial_weights": True, "first_masks": True}
