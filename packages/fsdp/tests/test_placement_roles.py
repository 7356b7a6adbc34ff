"""Placements of parameters, gradients and optimizer state, each for itself."""

import pytest
import torch

import fsdp
from testkit import CommLog, run_ranks
from testkit.models.residual_stack import batch, losses, shard, stack

pytestmark = pytest.mark.ranks

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")


def accumulates(model, last):
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_losses_have_the_bits_of_fsdp(param_dtype):
    def check():
        policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        options = {"mp_policy": policy}
        for how in ({"steps": 4}, {"micro": 2}):
            wanted = losses(shard(fsdp, stack(), **options), **how)
            for name in ONE_AXIS:
                found = losses(shard(fsdp, stack(), placements=name, **options), **how)
                assert torch.equal(found, wanted), name

    run_ranks(check, 2, timeout=120)


def test_changed_parameters_are_gathered_once_a_step():
    def check():
        found = {}
        for name in ONE_AXIS:
            model = shard(fsdp, stack(), placements=name, strategy="native")
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(2):  # the first one compares plans, too
                with CommLog() as log:
                    model(batch(step)).sum().backward()
                    optimizer.step()
            found[name] = [sum(c.op == op for c in log.calls) for op in ops]
        return found

    ops = ("all_gather", "reduce_scatter", "all_reduce")
    wanted = {"ddp": [4, 4, 0], "zero1": [4, 4, 0], "zero2": [4, 4, 0], "zero3": [7, 4, 0]}
    assert run_ranks(check, 2) == [wanted] * 2
