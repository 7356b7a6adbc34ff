"""Random trees of modules, sharded at random, train bit for bit as without sharding."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp import Block, Rows, Whole, fully_shard
from testkit import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, STEPS = 6, 2


@dataclass(frozen=True)
class Node:
    """A module with children, or a layer.

    Attributes:
        hidden: of a layer: its features between; 0 of a module with children.
        children: run one after the other.
        sharded: whether fully_shard is called on it.
        resharded: after forward; None: as fully_shard has it.
        granularity: of its parameters.
        frozen: whether its weights need no gradient.
    """

    hidden: int
    children: tuple["Node", ...]
    sharded: bool
    resharded: bool | None
    granularity: object
    frozen: bool


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, hidden),
            nn.Linear(hidden, WIDTH, bias=hidden % 2 == 0),
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


_GRANULARITIES = st.one_of(
    st.none(), st.just(Whole()), st.builds(Rows, st.integers(1, 9)),
    st.builds(Block, st.integers(1, 50)),
)  # fmt: skip


def _nodes(hidden, children):
    return st.builds(
        Node, hidden, children, st.booleans(), st.sampled_from([None, True, False]),
        _GRANULARITIES, st.booleans(),
    )  # fmt: skip


_LAYERS = _nodes(st.integers(1, 7), st.just(()))
_TREES = st.recursive(
    _LAYERS,
    lambda below: _nodes(st.just(0), st.lists(below, min_size=1, max_size=3).map(tuple)),
    max_leaves=6,
)


def _build(node):
    if node.hidden:
        module = Layer(node.hidden)
        for param in (module.up.weight, module.down.weight):
            param.requires_grad_(not node.frozen)
        return module
    return nn.Sequential(*map(_build, node.children))


def _shard(module, node):
    for child, below in zip(module, node.children, strict=True) if node.children else ():
        _shard(child, below)
    if node.sharded:
        fully_shard(
            module,
            reshard_after_forward=node.resharded,
            shard_placement_fn=lambda param: node.granularity,
        )


def _train(model, average):
    """Returns the losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def _average(model):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def _differing(tree):
    """Returns the names of values that differ from those without sharding."""
    torch.manual_seed(0)
    whole = _build(tree)
    torch.manual_seed(0)
    sharded = _build(tree)
    _shard(sharded, tree)
    fully_shard(sharded) if not tree.sharded else None
    wanted, params = _train(whole, _average)
    found, shards = _train(sharded, lambda _: None)
    different = [
        name
        for name, param in shards.items()
        if not torch.equal(param.full_tensor(), params[name].detach())
    ]
    return different + ([] if wanted == found else ["the losses"])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_TREES)
def test_tree_of_modules_trains_as_without_sharding(tree):
    assert run_ranks(_differing, 2, tree) == [[], []]
