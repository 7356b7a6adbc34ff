"""Runs on a simulated accelerator have the bits of the CPU's, without a race on device memory."""

import pytest

from testkit.sim.ranks import run_sim_ranks

# Options of a run, on 2 ranks or as many as `ranks` says.
RUNS = {
    # The 8-bit Adam has a kernel of its own on the CPU: packages/fsdp/tests/test_sim.py.
    "fsdp": {"system": "fsdp"},
    "plan": {"system": "plan", "dp_shard": 2},
}
MORE_RUNS = {
    "one device": {"system": "single", "ranks": 1, "clip_grad_norm": 1.0},
    "ddp": {"system": "ddp"},
    "fsdp1": {"system": "fsdp1"},
    "fsdp2": {"system": "fsdp2", "clip_grad_norm": 1.0},
    "Muon": {"system": "fsdp", "optimizer": "muon"},
    "mixed precision": {"system": "fsdp", "dtype": "bf16"},
    "mixed precision of one device": {"system": "single", "ranks": 1, "dtype": "bf16"},
    "a loss scale": {"system": "plan", "dp_shard": 2, "dtype": "fp16"},
    # The numbers of an emulated GPU, as the host and the device have generators of their own.
    "drawn on shards": {"system": "fsdp", "init": "sharded", "random": "dist-rng"},
    "dropout": {"system": "plan", "dp_shard": 2, "random": "dist-rng", "dropout": 0.1},
    "tensor parallel": {"system": "dtensor-tp"},
    "static": {"system": "plan", "tp": 2, "sp": True, "static": True},
    "ZeRO-3 by the plan": {"system": "plan", "dp_shard": 2, "zero3": True},
    "context parallel": {"system": "plan", "cp": 2, "cp_method": "ulysses"},
    "torchtitan": {"system": "torchtitan-style", "dp_shard": 2},
    "pipeline": {"system": "fsdp2", "pp_degree": 2},
    "experts": {"system": "plan", "dp_shard": 2, "ep": 2, "model": "mixtral-tiny"},
    "offload": {"system": "fsdp", "offload": True, "clip_grad_norm": 1.0},
    "offload, FSDP2": {"system": "fsdp2", "offload": True, "clip_grad_norm": 1.0},
    "offload, Muon": {"system": "plan", "dp_shard": 2, "offload": True, "optimizer": "muon"},
    "offload, static": {"system": "plan", "dp_shard": 2, "offload": True, "static": True},
    "offload in a pipeline": {
        "system": "plan",
        "dp_shard": 2,
        "pp_degree": 2,
        "offload": True,
        "ranks": 4,
    },
    "DiT": {"system": "fsdp", "model": "dit-tiny"},
    "HSDP": {"system": "plan", "dp_replicate": 2, "dp_shard": 2, "ranks": 4},
}


def trained(out, device, options):
    """The losses of three steps, the last after a resume, and the bytes that the device had."""
    import contextlib

    import torch.distributed as dist

    from dist_rng import Geometry
    from dist_rng.emulation.device import emulated_device
    from dist_rng.single_device import fused_dropout
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    size = dist.get_world_size()
    world = World(dist.get_rank(), size)
    options = {"model": "llama-tiny", "micro_batch": 2} | options
    config = TrainConfig(**options, out=out / device, device=device, steps=3)
    gpu = contextlib.ExitStack()
    if config.random == "dist-rng":
        gpu.enter_context(emulated_device(Geometry(sm_count=132, max_threads_per_sm=2048)))
        if device == "cpu":  # composes dropout; the simulated device has a GPU's operator
            gpu.enter_context(fused_dropout())
    losses = []
    with gpu:
        for steps in (2, 3):
            trainer = Trainer(prepare(config, size), world)
            while trainer.step < steps:
                loss = trainer.train_step()
                dist.all_reduce(loss)
                losses.append(loss.item() / size)
            trainer.save()
    kinds = {parameter.device.type for parameter in trainer.model.parameters()}
    return losses, kinds, trainer.step


def compared(out, options):
    """Trains on the CPU and on the simulated device, in one process."""
    on_cpu = {name: value for name, value in options.items() if name != "offload"}
    expected, cpu, _ = trained(out, "cpu", on_cpu)
    found, sim, steps = trained(out, "sim", options)
    return found, expected, cpu, sim, steps


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_RUNS)]
)
def test_a_run_has_the_losses_of_the_cpu(tmp_path, name):
    options = dict((RUNS | MORE_RUNS)[name])
    ranks = options.pop("ranks", 2)
    for found, expected, cpu, sim, steps in run_sim_ranks(
        compared, ranks, tmp_path, options, timeout=300
    ):
        assert found == expected
        assert len(found) == steps == 3
        assert (cpu, sim) == ({"cpu"}, {"cpu" if options.get("offload") else "sim"})
