"""Every system trains as one device does, and continues from any other's checkpoint."""

from pathlib import Path

import pytest
import torch

from integration.compare.variants import SYSTEMS, get_variant
from integration.errors import UsageError
from integration.models import model_shape
from integration.train.config import TrainConfig
from integration.train.launch.world import World
from integration.train.loop import Trainer
from integration.train.setup import prepare
from testkit import run_ranks

# Those whose times are compared; products are in test_degrees.py.
PARALLEL = [
    variant.name
    for variant in SYSTEMS
    if variant.name != "single"
    and variant.takes(model_shape("llama-tiny"))
    and variant.make().supports_checkpoints
]
# In the fast tier are those of the packages, and the one whose checkpoints they load.
FAST = ("ddp", "fsdp", "plan-tp-sp")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PARALLEL]
STEPS = 6


def train(rank, size, out, system, *, steps, resume="never", save_at=None, **options):
    """Train some steps on one rank and return the mean loss of each, as all ranks know it."""
    import torch.distributed as dist

    variant = {key: value for key, value in get_variant(system).choices.items() if key != "ranks"}
    config = TrainConfig(
        **variant,
        model="llama-tiny",
        out=Path(out),
        micro_batch=2,
        steps=steps,
        resume=resume,
        **options,
    )
    trainer = Trainer(prepare(config, size), World(rank, size))
    losses = []
    while trainer.step < steps:
        loss = trainer.train_step()
        dist.all_reduce(loss)
        losses.append(loss.item() / size)
        if trainer.step == save_at:
            trainer.save()
    return losses


def run(out, system, ranks, **options):
    """Train on ``ranks`` gloo ranks; every rank must come to the same losses."""

    def body(out, system, options):
        import torch.distributed as dist

        return train(dist.get_rank(), dist.get_world_size(), out, system, **options)

    first, *others = run_ranks(body, ranks, str(out), system, options)
    assert all(losses == first for losses in others)
    return torch.tensor(first, dtype=torch.float64)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The losses of one device, and its run folder with a checkpoint of step 3."""
    out = tmp_path_factory.mktemp("single")
    return run(out, "single", 1, steps=STEPS, save_at=3), out


# Norms of the tiny model's gradients are 0.7 to 2.4: some steps are clipped, and some are not.
CLIPPED = {"clip_grad_norm": 1.0, "warmup_steps": 2, "decay_steps": 2, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def clipped(single, tmp_path_factory):
    """The losses of one device with clipping and a schedule."""
    plain, _ = single
    out = tmp_path_factory.mktemp("clipped")
    losses = run(out / "clipped", "single", 1, steps=STEPS, **CLIPPED)
    unclipped = run(out / "not", "single", 1, steps=STEPS, **CLIPPED | {"clip_grad_norm": None})
    assert losses[0] - losses[-1] > 0.1, "the model does not learn: the comparison is empty"
    assert (losses - unclipped).abs().max() > 1e-3, "nothing was clipped"
    assert (losses - plain).abs().max() > 1e-3
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("system", CASES)
def test_a_system_resumes_the_checkpoint_of_one_device(system, single, tmp_path):
    expected, folder = single
    path = folder / "checkpoints" / "step-00000003"
    resumed = run(tmp_path, system, 2, steps=STEPS, resume=str(path))
    assert len(resumed) == STEPS - 3
    assert (resumed - expected[3:]).abs().max() <= model_shape("llama-tiny").tolerance


@pytest.mark.ranks
@pytest.mark.parametrize("system", CASES)
def test_a_system_trains_as_one_device_which_resumes_its_checkpoint_as_it_does_itself(
    system, clipped, tmp_path
):
    within = model_shape("llama-tiny").tolerance
    losses = run(tmp_path, system, 2, steps=STEPS, save_at=3, **CLIPPED)
    assert (losses - clipped).abs().max() <= within
    resumed = run(tmp_path, system, 2, steps=STEPS, resume="auto", **CLIPPED)
    assert torch.equal(resumed, losses[3:])
    resumed = run(tmp_path, "single", 1, steps=STEPS, resume="auto", **CLIPPED)
    assert len(resumed) == STEPS - 3
    assert (resumed - clipped[3:]).abs().max() <= within


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 4])  # every system trains on two, above
def test_a_reduction_of_a_degree_keeps_the_losses(ranks, single, tmp_path):
    expected, _ = single
    losses = run(tmp_path, "fsdp2", ranks, steps=STEPS)
    assert (losses - expected).abs().max() <= model_shape("llama-tiny").tolerance


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam8bit", "muon"])
def test_optimizers_train_sharded_as_under_ddp_and_each_resumes_the_others_checkpoint(
    optimizer, tmp_path
):
    options = {"steps": STEPS, "optimizer": optimizer}
    expected = run(tmp_path / "ddp", "ddp", 2, save_at=3, **options)
    assert expected[0] - expected[-1] > 0.1, "the model does not learn: the comparison is empty"
    for system in ("fsdp", "fsdp2"):
        losses = run(tmp_path / system, system, 2, save_at=3, **options)
        assert torch.equal(losses, expected), system
    for saved, resumed in (("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp2")):
        (path,) = (tmp_path / saved / "checkpoints").glob("step-*3")
        out = tmp_path / f"{saved}-{resumed}"
        losses = run(out, resumed, 2, resume=str(path), **options)
        assert torch.equal(losses, expected[3:]), (saved, resumed)


@pytest.mark.ranks
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    run(tmp_path, "fsdp", 2, steps=1, save_at=1, optimizer="muon")
    (path,) = (tmp_path / "checkpoints").iterdir()

    def body(path, out):
        import torch.distributed as dist

        with pytest.raises(
            UsageError, match="optimizer: expected 'adam8bit', as in this run, got 'muon'"
        ):
            train(dist.get_rank(), 2, out, "fsdp", steps=2, resume=path, optimizer="adam8bit")

    run_ranks(body, 2, str(path), str(tmp_path / "other"))


# A plan computes microbatches of as many samples on each rank as FSDP does, and as many of them.
@pytest.mark.ranks
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
def test_microbatches_of_a_plan_are_those_of_fsdp_on_each_rank(degrees, tmp_path):
    def body(out, degrees):
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        from integration.train.config import TrainConfig
        from integration.train.launch.world import World
        from integration.train.loop import Trainer
        from integration.train.setup import prepare

        found = []
        for system in ({"system": "fsdp"}, {"system": "plan"} | degrees):
            config = TrainConfig(model="llama-tiny", out=Path(out), micro_batch=2, **system)
            trainer = Trainer(prepare(config, 2), World(dist.get_rank(), 2))
            seen = []

            def note(_, inputs, seen=seen):
                (hidden, *_) = inputs
                local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
                seen.append(local.detach().clone())

            trainer.model.model.layers[0].register_forward_pre_hook(note)
            loss = trainer.train_step()
            dist.all_reduce(loss)
            found.append((seen, float(loss) / 2, trainer._summary()))
        return found

    for fsdp, plan in run_ranks(body, 2, str(tmp_path), degrees, timeout=240):
        assert [each.shape[0] for each in plan[0]] == [2, 2]
        assert all(map(torch.equal, fsdp[0], plan[0]))
        assert plan[1] == pytest.approx(fsdp[1], abs=1e-6, rel=0)
        summary = plan[2]
        assert (summary.data_parallel_degree, summary.accumulation) == (2, 2)
