"""A pipeline trains as one device does, whatever the schedule and whatever goes on in a stage."""

from pathlib import Path

import pytest
import torch

from integration.models import model_shape
from integration.pipeline.schedules import SCHEDULES
from integration.train.config import TrainConfig
from integration.train.loop import Trainer
from integration.train.setup import prepare
from integration.train.world import World
from testkit import run_ranks

STEPS = 20
# Four stages of models with two layers: one stage has what embeds, one what makes the outputs.
FOUR = {
    "llama-tiny": "model.layers.0,model.layers.1,model.norm",
    "mixtral-tiny": "model.layers.0,model.layers.1,model.norm",
    "dit-tiny": "model.blocks.0,model.blocks.1,model.final_layer",
}


def train(rank, size, out, options):
    """Train on one rank; return the mean loss of each step, as all ranks know it."""
    import torch.distributed as dist

    save_at = options.pop("save_at", None)
    config = TrainConfig(
        **{"out": Path(out), "micro_batch": 4, "resume": "never", "steps": STEPS} | options
    )
    trainer = Trainer(prepare(config, size), World(rank, size))
    losses = []
    while trainer.step < config.steps:
        loss = trainer.train_step()
        dist.all_reduce(loss)
        losses.append(loss.item() / size)
        if trainer.step == save_at:
            trainer.save()
    return losses


def run(out, ranks, **options):
    """Train on ``ranks`` gloo ranks; every rank must come to the same losses."""

    def body(out, options):
        import torch.distributed as dist

        return train(dist.get_rank(), dist.get_world_size(), out, options)

    first, *others = run_ranks(body, ranks, str(out), options)
    assert all(losses == first for losses in others)
    return torch.tensor(first, dtype=torch.float64)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The losses of one device, by model and further options."""
    known = {}

    def of(model, **options):
        key = (model, *sorted(options.items()))
        if key not in known:
            known[key] = run(tmp_path_factory.mktemp("single"), 1, model=model, **options)
            assert known[key][0] - known[key][-1] > 0.05, "the comparison is empty"
        return known[key]

    return of


def points(model, schedule, ranks):
    stages = (schedule.stages_per_rank or 2) * ranks
    return {"pp_split_points": FOUR[model]} if stages == 4 else {}


@pytest.mark.ranks
@pytest.mark.parametrize("model", FOUR)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_train_as_one_device(schedule, model, single, tmp_path):
    expected = single(model)
    losses = run(
        tmp_path, 2, model=model, pp_degree=2, pp_schedule=schedule, pp_microbatches=4,
        **points(model, SCHEDULES[schedule], 2),
    )  # fmt: skip
    assert (losses - expected).abs().max() <= model_shape(model).tolerance
