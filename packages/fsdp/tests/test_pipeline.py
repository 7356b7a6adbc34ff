"""Sharded stages of torch's pipeline schedules are reduced once, after the last microbatch."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fsdp
from testkit import CommLog, run_ranks

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MICROBATCHES = 4


def _stage(package, mesh):
    """Two of four layers, in three groups."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    first = 2 * mesh.get_local_rank("pp")
    module = nn.Sequential(*layers[first : first + 2], nn.Linear(8, 8))
    for layer in module[:2]:
        package.fully_shard(layer, mesh=mesh["dp"])
    return package.fully_shard(module, mesh=mesh["dp"])


def _step(package, schedule, mesh):
    """Returns the gradients of this rank's stage, and the number of reductions."""
    module = _stage(package, mesh)
    number = mesh.get_local_rank("pp")
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    run = schedule(
        stage, n_microbatches=MICROBATCHES, loss_fn=lambda out, y: (out - y).square().mean()
    )
    torch.manual_seed(10 + mesh.get_local_rank("dp"))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with CommLog() as log:
        run.step(x) if number == 0 else run.step(target=y)
    reductions = log.counts().get("reduce_scatter", 0)
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}, reductions


def _both(name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    actual, reductions = _step(_Native, SCHEDULES[name], mesh)
    native, _ = _step(torch_fsdp, SCHEDULES[name], mesh)
    return {name: torch.equal(grad, native[name]) for name, grad in actual.items()}, reductions


class _Native:
    """fully_shard with the backend's collectives, which are counted by their names."""

    @staticmethod
    def fully_shard(module, **options):
        return fsdp.fully_shard(module, strategy="native", **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_reduces_each_group_once_to_the_gradients_of_fsdp2(schedule):
    for equal, reductions in run_ranks(_both, 4, schedule, timeout=240):
        assert all(equal.values()), equal
        assert reductions == 3
