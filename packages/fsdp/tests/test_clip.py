"""Clipping takes the gradients of a group as one tensor, and counts all of a gradient once."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fsdp
from fsdp import clip_grad_norm_
from testkit import CommLog, run_ranks
from testkit.models.residual_stack import batch, shard, stack


def with_grads(model, *, of=lambda param, value: value):
    torch.manual_seed(3)
    for param in model.parameters():
        param.grad = of(param, torch.randn(param.shape))
    return model


@pytest.mark.ranks
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_tensor_parallel_gradients_count_once(order):
    """Along tp some are sharded and some replicated; one is a sum that is not reduced yet."""

    def check():
        for sizes in ((1, 2), (2, 1)):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            model, plain = stack(), with_grads(stack())
            for block in list(model)[:3]:
                for layer, at in ((block.up, Shard(0)), (block.down, Replicate())):
                    placed = distribute_tensor(layer.weight.detach(), mesh["tp"], [at])
                    layer.weight = nn.Parameter(placed)
                fsdp.fully_shard(block, mesh=mesh["dp"])

            def placed_like(param, grad):
                if not isinstance(param, DTensor):
                    return grad
                places = [Replicate()] * param.device_mesh.ndim
                grad = distribute_tensor(grad, param.device_mesh, places)
                if param is model[0].norm.weight:  # noqa: B023
                    half = grad.to_local() / param.device_mesh.size()
                    return DTensor.from_local(half, param.device_mesh, [Partial()])
                return grad.redistribute(placements=param.placements)

            with_grads(model, of=placed_like)
            norm = clip_grad_norm_(model.parameters(), 0.5, order)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
            torch.testing.assert_close(norm, expected)
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                grad = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
                torch.testing.assert_close(grad, other.grad)

    run_ranks(check, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_group_is_one_tensor_and_a_mesh_one_all_reduce(foreach):
    def check():
        model = shard(fsdp, stack())
        model(batch(0)).square().mean().backward()
        name = "_foreach_mul_" if foreach is not False else None
        with (
            CommLog() as log,
            mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as scale,
        ):
            clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
        log.assert_counts({"all_reduce": 1})
        assert [len(call.args[0]) for call in scale.call_args_list] == ([4] if name else [])
        total = sum(p.grad.full_tensor().square().sum() for p in model.parameters()).sqrt()
        torch.testing.assert_close(total, torch.tensor(1e-3), rtol=1e-3, atol=0)

    run_ranks(check, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("order", [2.0, 3.0])
def test_stages_of_a_pipeline_are_clipped_on_buffers_by_the_norm_of_all(order):
    """Two stages, of one and two blocks, on two ranks each; powers of norms add up over them."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        first = mesh.get_local_rank("pp") == 0
        stage = stack(1 if first else 2)
        groups = len(shard(fsdp, stage, mesh=mesh["dp"]))
        stage(batch(0)).square().mean().backward()
        grads = [param.grad for param in stage.parameters()]
        full = [grad.full_tensor() for grad in grads]
        power = sum(grad.abs().pow(order).sum() for grad in full)
        dist.all_reduce(power, group=mesh.get_group("pp"))

        own = fsdp.get_total_norm(grads, order).pow(order)
        dist.all_reduce(own, group=mesh.get_group("pp"))
        norm = own.pow(1 / order)
        torch.testing.assert_close(norm, power.pow(1 / order))
        with mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as scale:
            fsdp.clip_grads_with_norm_(stage.parameters(), 1e-3, norm)
        [call] = scale.call_args_list
        assert len(call.args[0]) == groups < len(grads)
        for param, before in zip(stage.parameters(), full, strict=True):
            expected = before * (1e-3 / (norm + 1e-6))
            torch.testing.assert_close(param.grad.full_tensor(), expected)

    run_ranks(check, 4)


def test_the_norm_of_a_large_gradient_has_all_digits():
    """In one float32 per lane, 8 million squares lose three of seven digits."""
    param = nn.Parameter(torch.zeros(8_000_001))
    torch.manual_seed(0)
    param.grad = torch.randn(param.shape)
    for order in (1.0, 2.0, math.inf):
        expected = torch.linalg.vector_norm(param.grad.double(), order).float()
        torch.testing.assert_close(
            clip_grad_norm_([param], math.inf, order), expected, rtol=1e-6, atol=0
        )


def test_orders_that_are_no_norm_are_refused():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    for order in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="expected a norm_type above 0, got"):
            clip_grad_norm_([param], 1.0, order)
    assert torch.equal(param.grad, torch.ones(2))
