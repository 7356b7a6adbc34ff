"""Trainers and commands on real ranks, for the tests of what a run can be told."""

import os
from pathlib import Path

import pytest

from integration.option_table.pairwise import proving_runs
from testkit import free_port, preload, run_ranks, start_python
from testkit.ranks.network_hosts import NetworkHosts, no_network_hosts
from testkit.sim.ranks import run_sim_ranks

preload(
    "integration.train.loop",
    "integration.train.launch.local",
    "integration.train.validation",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture
def hosts():
    """Two hosts, as network namespaces."""
    reason = no_network_hosts()
    if reason is not None:
        pytest.skip(reason)
    with NetworkHosts() as made:
        yield made


@pytest.fixture(scope="session")
def start_on_ranks():
    """Starts ``python ARGUMENTS`` on ranks that join by the environment; returns the processes."""

    def start_on_ranks(ranks, *arguments):
        port = free_port()
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            start_python(*arguments, environment=os.environ | shared | {"RANK": str(rank)})
            for rank in range(ranks)
        ]

    return start_on_ranks


def _train(runs, *, steps):
    """Train some steps for each run's options, on this rank."""
    import torch
    import torch.distributed as dist

    import dtensor_rules
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    # Processes of the pool have had other tests: one by a plan on two ranks, say, but not on four.
    enabled = torch.tensor(int(dtensor_rules.is_enabled()))
    dist.all_reduce(enabled, dist.ReduceOp.MAX)
    if enabled:
        dtensor_rules.enable()
    world = World(dist.get_rank(), dist.get_world_size())
    losses = []
    for given in runs:
        options = dict(given)
        save_at = options.pop("save_at", None)
        config = TrainConfig(**{"model": "llama-tiny", "micro_batch": 2, "steps": steps} | options)
        trainer = Trainer(prepare(config, world.size), world)
        losses.append([])
        while trainer.step < config.steps:
            loss = trainer.train_step()
            dist.all_reduce(loss)
            losses[-1].append(loss.item() / world.size)
            if trainer.step == save_at:
                trainer.save()
        if "keep_checkpoints" in options or "checkpoint_async" in options:
            trainer.save(wait=False)
            trainer.finish_saving()
    return losses


@pytest.fixture(scope="session")
def train_runs():
    """Trains several runs on as many ranks as are given; returns the losses of each.

    A run is a dict of the trainer's options; ``save_at`` is a step behind which it saves. All runs
    of a call are on the CPU, or all on the simulated device.
    """

    def train_runs(ranks, runs, *, out, steps=3, timeout=240):
        runs = [{"out": Path(out), "resume": "never"} | run for run in runs]
        on_sim = any(run.get("device") == "sim" for run in runs)
        start = run_sim_ranks if on_sim else run_ranks
        first, *others = start(_train, ranks, runs, steps=steps, timeout=timeout)
        assert all(losses == first for losses in others)
        for run, found in zip(runs, first, strict=True):
            learns = run["resume"] == "never" and len(found) > 1
            assert not learns or found[0] > found[-1], "nothing was learned"
        return first

    return train_runs


class OptionRuns:
    """Runs of an option table, each made once and observed on all of its ranks.

    Args:
        observe: returns one rank's observations; called with a run's options.
        options_of: returns the options of a run, ``ranks`` among them.
        is_right: whether the results of a run are those expected, whatever its options.
    """

    def __init__(self, observe, options_of, is_right=lambda ranks, options: True):
        self._observe, self._options_of, self._is_right = observe, options_of, is_right
        self._observed = {}

    def observed(self, run):
        """Returns the observations of all ranks; fails the test if the run has failed."""
        if run not in self._observed:
            options = self._options_of(run)
            try:
                found = tuple(run_ranks(self._observe, options["ranks"], options, timeout=360))
            except Exception as error:
                found = error
            self._observed[run] = found
        if isinstance(self._observed[run], Exception):
            pytest.fail(f"{_names(run)}: {self._observed[run]}")
        return self._observed[run]

    def on(self, ranks, runs):
        """Those of the runs that are on this many ranks."""
        return [run for run in runs if self._options_of(run)["ranks"] == ranks]

    def check_on_two_ranks(self, choice, runs):
        """Does what `check` does; skips where no run on two ranks has the choice."""
        if not any(choice in run for run in self.on(2, runs)):
            pytest.skip(
                f"no run of the fast tier on two ranks has {choice.name}; the slow tier runs it"
            )
        self.check(choice, proving_runs(self.on(2, runs)))

    def check(self, choice, runs):
        """Fails where no run has the choice, or one with it fails or does not prove it."""
        proving = [run for run in runs if choice in run]
        assert proving, f"no run has {choice.name}"
        for run in proving:
            options = self._options_of(run)
            seen = self.observed(run)
            assert choice.proof(seen, options), f"{choice.name} is ignored in {_names(run)}"
            assert self._is_right(seen, options), _names(run)


def _names(choices):
    return ", ".join(choice.name for choice in choices)


@pytest.fixture(scope="session")
def option_runs():
    """The class of an option table's runs; each module of tests makes its own."""
    return OptionRuns


def _write_run(run, described):
    """Writes the run folder of a made-up run; returns its outcome."""
    from integration.compare.runner import Outcome
    from integration.train.metrics import MetricsFile, RunSummary, StepRecord, write_summary

    job = run.job
    described = {"losses": [5.0, 4.0, 3.5], "exit": 0, "seconds": 0.5} | described
    losses, code = described.pop("losses"), described.pop("exit")
    seconds = described.pop("seconds")
    job.folder.mkdir(parents=True)
    job.log.write_text("Traceback: <broken> & gone\n")
    metrics = MetricsFile(job.folder, keep_steps=0)
    for step, loss in enumerate(losses, start=1):
        metrics.append(StepRecord(step=step, loss=loss, seconds=seconds, tokens=512))
    metrics.close()
    summary = {
        "system": job.system,
        "model": job.model,
        "parameters": 115008,
        "world_size": job.ranks,
        "data_parallel_degree": 1,
        "accumulation": 2,
        "micro_batch": 4,
        "steps": len(losses),
        "data_source": "some text",
        "peak_rss_bytes": [2**20] * job.ranks,
    }
    if code == 0:
        write_summary(job.folder, RunSummary(**summary | described))
    return Outcome(job, code)


@pytest.fixture
def made_up_results():
    """Returns the setting and the results of an experiment whose runs are made up.

    ``describe`` returns what differs from a usual run: ``losses``, ``exit``, ``seconds``, and
    fields of the summary.
    """
    from integration.compare.experiment import SharedOptions
    from integration.compare.result import compare_runs

    def results_of(experiment, own, out, describe=lambda run: {}, **shared):
        setting = experiment.setting(SharedOptions(out=out, **shared), own)
        runs = experiment.runs(setting)
        outcomes = [_write_run(run, dict(describe(run))) for run in runs]
        return setting, compare_runs(runs, outcomes)

    return results_of
