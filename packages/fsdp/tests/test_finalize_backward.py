"""`finalize_backward`: its order, its handle and its errors are those of FSDP2 of torch 2.15."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from testkit import run_ranks
from testkit.models.residual_stack import batch, losses, shard, stack

# Where torch has it, both are compared; elsewhere the sentences of 2.15 are expected of this one.
PACKAGES = [fsdp, torch_fsdp] if hasattr(torch_fsdp.FSDPModule, "finalize_backward") else [fsdp]


def refused(message, call, *args, **options):
    with pytest.raises(RuntimeError, match=message):
        call(*args, **options)


def test_it_ends_an_iteration():
    def check():
        model, plain = shard(fsdp, stack()), shard(fsdp, stack())
        model.set_manual_backward_finalization(True)
        for number in (0, 1):
            for one in (model, plain):
                one.set_requires_gradient_sync(number == 1 and one is plain)
                one(batch(number)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, fsdp.GradientReductionHandle)
        handle.wait()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad.full_tensor(), wanted.grad.full_tensor())
        model.zero_grad()
        model(batch(2)).square().mean().backward()
        assert any(param.grad is None for param in model.parameters())  # nobody has waited
        assert model.finalize_backward() is None
        assert all(param.grad is not None for param in model.parameters())

    run_ranks(check, 2)


def _errors(package):
    """Asserts that wrong calls raise; returns losses afterwards."""
    model = shard(package, stack())
    assert model.finalize_backward() is None  # before the first forward there is nothing
    model.finalize_backward(async_op=True).wait()

    model(batch(0)).sum().backward()
    refused("requires manual backward finalization", model.finalize_backward)
    refused("must be called on the root", model[0].finalize_backward)
    refused("must be called on the root", model[0].set_manual_backward_finalization, True)
    model.set_is_last_backward(False)
    model(batch(0)).sum().backward()
    refused("after backward starts", model.set_manual_backward_finalization, True)
    model.set_is_last_backward(True)
    model(batch(0)).sum().backward()
    model.set_manual_backward_finalization(True)

    def in_backward(grad):
        refused("after backward completes", model.finalize_backward)
        refused("mode during backward", model.set_manual_backward_finalization, False)

    hook = model[0].down.register_forward_hook(
        lambda module, args, out: out.register_hook(in_backward) and None
    )
    model(batch(0)).sum().backward()
    hook.remove()
    refused("after backward starts", model.set_manual_backward_finalization, False)
    handle = model.finalize_backward(async_op=True)
    refused("waited on before forward", model, batch(0))
    refused("waited on before finalizing", model.finalize_backward)
    handle.wait()
    handle.wait()
    model(batch(0)).sum().backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    refused("invalidated", handle.wait)
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    return losses(model), losses(shard(package, stack()))


@pytest.mark.parametrize("package", PACKAGES)
def test_wrong_calls_raise_what_fsdp2_raises(package):
    for actual, wanted in run_ranks(_errors, 2, package):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("package", PACKAGES)
def test_gradients_that_are_not_all_reduced_are_refused(package):
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = shard(package, stack(), mesh=mesh)
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        model(batch(0)).sum().backward()
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        with pytest.raises(RuntimeError, match="requires all-reduce"):
            model.finalize_backward()
        model.set_requires_all_reduce(True)
        model.finalize_backward()
        model.set_requires_all_reduce(False)
        for _ in range(2):
            model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match="does not support partial gradient reductions"):
            model.finalize_backward()
        model.set_requires_all_reduce(True)
        model(batch(0)).sum().backward()
        model.finalize_backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    first, second = run_ranks(check, 2)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("package", PACKAGES)
def test_roots_that_share_streams_wait_for_each_other(package):
    def check():
        models = [shard(package, stack()) for _ in range(2)]
        for model in models:
            model(batch(0)).sum().backward()
            model.zero_grad()
        package.share_comm_ctx(models)
        one, other = models
        for model in models:
            model.set_manual_backward_finalization(True)
            model(batch(1)).sum().backward()
        refused(
            "Asynchronous gradient finalization cannot overlap work from another FSDP root sharing "
            "the communication context",
            one.finalize_backward, async_op=True,
        )  # fmt: skip
        other.finalize_backward()
        handle = one.finalize_backward(async_op=True)
        refused("The previous gradient reduction must be waited on before forward", other, batch(2))
        for async_op in (False, True):
            refused(
                "Another gradient reduction sharing this communication context must be waited on "
                "before finalizing backward",
                other.finalize_backward, async_op=async_op,
            )  # fmt: skip
        refused(
            "reset_iter_state cannot reset a gradient reduction owned by another FSDP root sharing "
            "the communication context",
            other.reset_iter_state,
        )
        handle.wait()
        other.reset_iter_state()
        grads = [param.grad.full_tensor() for param in one.parameters()]
        one.zero_grad()
        one(batch(1)).sum().backward()
        one.finalize_backward(async_op=True).wait()
        return [
            torch.equal(a, b.grad.full_tensor())
            for a, b in zip(grads, one.parameters(), strict=True)
        ]

    for equal in run_ranks(check, 2):
        assert all(equal)
