"""Batch and group norm of DTensors have the numbers of one device, and gather no activations."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plan_api.patches import install_patches
from testkit import TORCH_RELEASE, CommLog, run_ranks

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)

MODULES = {
    "batch norm": lambda: nn.BatchNorm2d(6),
    "batch norm, cumulative": lambda: nn.BatchNorm2d(6, momentum=None),
    "batch norm, without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "batch norm, without weights": lambda: nn.BatchNorm2d(6, affine=False),
    "group norm": lambda: nn.GroupNorm(2, 6),
}


def _make(name):
    torch.manual_seed(1)
    module = MODULES[name]()
    for param in module.parameters():
        nn.init.normal_(param)
    return module


def _placed(module, mesh, placement):
    """Shards channels of parameters and statistics as those of the input."""
    placed = copy.deepcopy(module)
    of_channels = S0 if placement == S1 else R
    for name, param in [*placed.named_parameters()]:
        sharded = distribute_tensor(param.detach(), mesh, [of_channels], src_data_rank=None)
        setattr(placed, name, nn.Parameter(sharded))
    for name, buffer in [*placed.named_buffers()]:
        to = of_channels if buffer.ndim else R
        placed.register_buffer(name, distribute_tensor(buffer, mesh, [to], src_data_rank=None))
    return placed


def _run(module, batches):
    """Trains on all but the last batch; returns outputs, gradients and statistics."""
    found = []
    for number, batch in enumerate(batches):
        module.train(number < len(batches) - 1)
        leaf = batch.detach().clone().requires_grad_()
        out = module(leaf)
        out.square().mul(out).sum().backward()
        found += [out.detach(), leaf.grad]
    return [*found, *(param.grad for param in module.parameters()), *module.buffers()]


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks
def test_norms_of_shards_have_the_numbers_of_one_device():
    """Outputs, gradients and running statistics, in training and evaluation; 3 rows on 2 ranks."""

    def check():
        install_patches(())
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        found = {}
        for name in MODULES:
            for placement in (R, S0, S1, S2, P):
                if name == "group norm" and placement == S2:
                    continue
                torch.manual_seed(0)
                batches = [3 + 2 * torch.randn(3, 6, 3, 2) for _ in range(3)]
                module = _make(name)
                placed = [distribute_tensor(one, mesh, [placement]) for one in batches]
                with CommLog() as log:
                    actual = _run(_placed(module, mesh, placement), placed)
                per_batch = {"all_gather": 1, "all_reduce": 1}
                needed = name.startswith("batch norm") and placement in (S0, S2)
                expected = _run(module, batches)
                found[name, str(placement)] = [
                    torch.allclose(_full(one), other, rtol=1e-4, atol=1e-4)
                    for one, other in zip(actual, expected, strict=True)
                ]
                if placement != P:
                    batches_in_training = 3 if "statistics" in name else 2
                    sent = {op: n * batches_in_training for op, n in per_batch.items() if needed}
                    found[name, str(placement)] += [
                        actual[0].placements == (placement,),
                        # 2.11 gathers the gradient of the sum, too, where dim 2 is sharded.
                        log.counts() == sent or (TORCH_RELEASE < (2, 12) and placement == S2),
                    ]
        return found

    for found in run_ranks(check, 2):
        assert {case: facts for case, facts in found.items() if not all(facts)} == {}


def test_running_statistics_placed_otherwise_than_the_channels_are_refused(mesh):
    """Torch would update them by this rank's channels only."""
    install_patches(())
    x = distribute_tensor(torch.ones(2, 4, 3), mesh, [R, S1], src_data_rank=None)
    module = nn.BatchNorm1d(4)
    for name, buffer in [*module.named_buffers()]:
        module.register_buffer(name, distribute_tensor(buffer, mesh, [R, R], src_data_rank=None))
    with pytest.raises(ValueError, match=r"statistics placed as the channels.*got \(Replicate"):
        module(x)
