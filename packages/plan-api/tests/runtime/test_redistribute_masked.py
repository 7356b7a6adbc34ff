"""What an embedding with cut rows makes is a sum of a kind of its own; its gradient is not."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api.lowering.ir import AxisMove, OpKind, SiteStep
from plan_api.runtime.redistribute import Redistribution
from testkit import fake_mesh


@pytest.mark.parametrize(
    ("given", "comes"),
    [(Partial(), Partial()), (Shard(0), Replicate()), (Replicate(), Replicate())],
    ids=["sum", "shard", "whole"],
)
def test_the_gradient_of_a_masked_partial_is_partial_or_replicated(given, comes):
    # torch 2.13 takes a sum for a masked one here; 2.15 refuses it.
    with fake_mesh((2,), ("tp",)) as mesh:
        step = SiteStep("<out>", 0, OpKind.REDIST, {"tp": AxisMove(Replicate())}, (0,))
        rows = DTensor.from_local(torch.randn(4, 3), mesh, [Shard(0)], run_check=False)
        ids = DTensor.from_local(torch.tensor([0, 3]), mesh, [Replicate()], run_check=False)
        made = F.embedding(ids, rows.requires_grad_())
        assert type(made.placements[0]) is not Partial
        moved = Redistribution(step, mesh, "embedding")(made)
        local = torch.ones(1, 3) if given == Shard(0) else torch.ones(2, 3)
        grad = DTensor.from_local(local, mesh, [given], run_check=False)
        (back,) = torch.autograd.grad(moved, made, grad)
    assert back.placements == (comes,)
    assert type(back.placements[0]) is type(comes)
