"""The comparison as a user runs it, with the real trainer."""

import json

import pytest

from integration.compare.experiment import SharedOptions
from integration.compare.experiments import random_numbers, systems
from integration.compare.experiments.random_numbers import RandomOptions
from integration.compare.experiments.systems import SystemOptions
from integration.compare.result import Verdict, compare_runs
from integration.compare.runner import Outcome
from testkit import run_python, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of DDP with the single device, and where its results lie."""
    out = tmp_path_factory.mktemp("comparison") / "results"
    options = ["--systems", "ddp", "--models", "llama-tiny", "--steps", str(STEPS)]
    options += ["--experiments", "systems"]
    command = ["-m", "integration.compare", *options, "--out", str(out)]
    return out, run_python(*command, timeout=300)


@pytest.mark.slow  # four interpreters; in test_compare_runs.py the command has a stand-in's runs
def test_it_passes_and_says_so(finished):
    out, result = finished
    assert result.returncode == 0, result.stderr
    assert "passes: " in result.stdout
    assert f"report: {out / 'report.html'}" in result.stdout
    assert "llama-tiny-single: 1 rank, 6 steps" in result.stderr


@pytest.mark.slow
def test_every_file_is_there(finished):
    out, _ = finished
    figures = [f"figures/{kind}-llama-tiny.png" for kind in ("losses", "cost")]
    for name in ("report.md", "report.html", "results.json", *figures):
        assert (out / name).stat().st_size > 0
    for name in ("single", "ddp"):
        assert (out / "runs" / "systems" / f"llama-tiny-{name}.log").exists()


def _check(single, ddp):
    """Checks the results of both systems, as results.json has them."""
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


@pytest.mark.slow
def test_the_results_hold_every_step_of_both_systems(finished):
    out, _ = finished
    results = json.loads((out / "results.json").read_text())
    assert results["passes"]
    _check(*results["experiments"]["systems"]["runs"])


def _train(runs):
    import torch.distributed as dist

    from integration.train.config import parse_config
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare
    from integration.train.stop import StopRequest

    world = World(dist.get_rank(), dist.get_world_size())
    for arguments in runs:
        assert Trainer(prepare(parse_config(arguments), world.size), world).run(StopRequest())


def _trained(runs):
    """Trains the runs' jobs; returns their results."""
    for run in runs:
        run_ranks(_train, run.job.ranks, [run.job.arguments], timeout=240)
    return compare_runs(runs, [Outcome(run.job, 0) for run in runs])


def test_the_jobs_of_systems_train_every_step_within_the_tolerance(tmp_path):
    own = SystemOptions(systems="ddp", models="llama-tiny", steps=STEPS)
    setting = systems.EXPERIMENT.setting(SharedOptions(out=tmp_path), own)
    results = _trained(systems.EXPERIMENT.runs(setting))
    assert all(result.verdict.passes for result in results)
    _check(*(result.facts() for result in results))


def test_the_jobs_of_random_numbers_do_what_they_say(tmp_path):
    # All ten would take minutes: one case, on one device and on two ranks with dist-rng.
    chosen = ("dropout-single-1-native", "dropout-dtensor-tp-2-dist-rng")
    setting = random_numbers.EXPERIMENT.setting(SharedOptions(out=tmp_path), RandomOptions(steps=3))
    runs = random_numbers.EXPERIMENT.runs(setting)
    single, sharded = _trained([run for run in runs if run.job.name in chosen])
    assert sharded.failure is None, sharded.failure
    assert single.verdict is Verdict.REFERENCE
    assert sharded.verdict is Verdict.SAME
    assert sharded.equal == {"initial_weights": True, "first_masks": True}
