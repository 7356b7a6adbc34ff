"""WholeMatrices: steps of Muon send nothing, and all ranks have equal work."""

import pytest
import torch
from torch import nn

from fsdp import Block, Whole, fully_shard
from fsdp.optim import Muon, WholeMatrices
from fsdp.optim.muon.newton_schulz import newton_schulz_cost
from testkit import CommLog, run_ranks
from testkit.models.matrix_net import full_tensors


class Layer(nn.Module):
    """A norm and three matrices, one of which has most of the work."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 24, bias=False)
        self.down, self.gate = nn.Linear(24, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.tanh(self.up(y))) * torch.sigmoid(self.gate(y))


def layers(placement):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(8)])
    for layer in model:
        fully_shard(layer, shard_placement_fn=placement)
    return fully_shard(model)


def muon(model):
    matrices = [(name, param) for name, param in model.named_parameters() if param.ndim == 2]
    rest = [(name, param) for name, param in model.named_parameters() if param.ndim < 2]
    return Muon([{"params": matrices}, {"params": rest, "use_muon": False, "lr": 1e-3}], lr=0.02)


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    with CommLog() as log:
        optimizer.step()
    log.assert_counts({})
    optimizer.zero_grad()
    return loss.item()


def busiest(optimizer, model, ranks):
    """Returns the work of the busiest rank over an equal share."""
    busy = [0] * ranks
    for name, param in model.named_parameters():
        if name in optimizer.owners():
            busy[optimizer.owners()[name]] += newton_schulz_cost(param.shape)
    return max(busy) * ranks / sum(busy)


def whole(param):
    return Whole() if param.ndim == 2 else Block(1)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_owners_are_balanced_over_groups_and_compute_the_same_bits(ranks):
    def check():
        found = []
        for placement in (WholeMatrices(), whole):
            model = layers(placement)
            optimizer = muon(model)
            losses = [step(model, optimizer, seed) for seed in range(5)]
            found.append((losses, full_tensors(model), busiest(optimizer, model, ranks)))
        (losses, params, balanced), (expected, others, bytes_alone) = found
        assert losses == expected
        assert all(torch.equal(params[name], others[name]) for name in others)
        return balanced, bytes_alone

    for balanced, bytes_alone in run_ranks(check, ranks):
        assert balanced < 1.1
        assert bytes_alone > 1.15  # what it is for


@pytest.mark.ranks
def test_two_models_sharded_in_the_same_way_have_the_same_placements():
    def check():
        one, other = layers(WholeMatrices()), layers(WholeMatrices())
        return [
            a.placements == b.placements
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
        ]

    assert all(all(alike) for alike in run_ranks(check, 4))


@pytest.mark.ranks
def test_stack_of_experts_has_one_owner_and_the_work_of_all_experts():
    def check():
        model = nn.Module()
        model.stack = nn.Parameter(torch.ones(5, 4, 6))
        model.matrix = nn.Parameter(torch.ones(4, 6))
        model.bias = nn.Parameter(torch.ones(6))
        placement = WholeMatrices()
        assert placement(model.stack).work == 5 * placement(model.matrix).work
        assert placement(model.bias) is None
        fully_shard(model, shard_placement_fn=placement)
        return placement.balance.busy(model.stack.device_mesh)

    work = newton_schulz_cost((4, 6))
    assert run_ranks(check, 2) == [(5 * work, work)] * 2


@pytest.mark.ranks
def test_two_objects_balance_their_matrices_separately():
    def check():
        model = nn.ParameterList([torch.ones(4, 6), torch.ones(5, 8)])
        first, second = WholeMatrices(), WholeMatrices()
        fully_shard(model, shard_placement_fn=lambda p: (first if len(p) == 4 else second)(p))
        mesh = model[0].device_mesh
        return [one.balance.busy(mesh) for one in (first, second)]

    work = sorted([newton_schulz_cost((4, 6)), newton_schulz_cost((5, 8))])
    for found in run_ranks(check, 2):
        assert sorted(sum(busy) for busy in found) == work
