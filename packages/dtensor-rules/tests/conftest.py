"""What tests of several files begin with."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import dtensor_rules
from dtensor_rules import _compat
from testkit import fake_mesh


@pytest.fixture
def mesh():
    """A fake mesh of two, with the library on and nothing counted yet."""
    with fake_mesh((2,)) as mesh, dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        yield mesh


@pytest.fixture
def x(mesh):
    """A sharded DTensor of shape (4, 4)."""
    # Nothing is sent: torch 2.11's fake group leaves what it scatters as it was allocated.
    whole = torch.arange(16.0).reshape(4, 4)
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


@pytest.fixture
def same_rules_after():
    """Rules that a test registers are gone after it."""
    before = {listed.rule.name for listed in dtensor_rules.rules()}
    yield
    for name in [listed.rule.name for listed in dtensor_rules.rules()]:
        if name not in before:
            dtensor_rules.remove_rule(name)


@pytest.fixture(scope="class")
def same_memory_every_time():
    """New memory is filled, where the fake group leaves what it receives as it was allocated."""
    torch.use_deterministic_algorithms(_compat.RELEASE < (2, 13), warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
