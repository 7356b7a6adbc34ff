"""Trainers on real ranks, for the tests of what a run can be told."""

from pathlib import Path

import pytest

from testkit import run_ranks


def _train(runs, *, steps):
    """Train some steps for each run's options, on this rank."""
    import torch
    import torch.distributed as dist

    import dtensor_rules
    from integration.train.config import TrainConfig
    from integration.train.loop import Trainer
    from integration.train.setup import prepare
    from integration.train.world import World

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

    A run is a dict of the trainer's options; ``save_at`` is a step behind which it saves.
    """

    def train_runs(ranks, runs, *, out, steps=3):
        runs = [{"out": Path(out), "resume": "never"} | run for run in runs]
        first, *others = run_ranks(_train, ranks, runs, steps=steps, timeout=240)
        assert all(losses == first for losses in others)
        assert all(run[0] > run[-1] for run in first if len(run) > 1), "nothing was learned"
        return first

    return train_runs
