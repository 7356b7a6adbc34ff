"""Modules on meta, casts, errors in a step, torch.compile, inference and checkpointing."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp
from testkit import models, run_ranks
from testkit.inspection.memory import peak_bytes
from testkit.models.residual_stack import ResidualBlock, batch, losses, shard, stack

pytestmark = pytest.mark.ranks


def test_model_on_meta_materializes_only_shards():
    def check():
        with torch.device("meta"):
            model = nn.Sequential(*[ResidualBlock() for _ in range(3)], nn.Linear(8, 4))
        shard(fsdp, model)
        assert all(param.device.type == "meta" for param in model.parameters())
        model.to_empty(device="cpu")
        full = stack()
        local_numel = sum(p.to_local().numel() for p in model.parameters())
        assert local_numel < 0.6 * sum(p.numel() for p in full.parameters())
        with torch.no_grad():
            for param, value in zip(model.parameters(), full.parameters(), strict=True):
                whole = torch.distributed.tensor.distribute_tensor(
                    value.detach(), param.device_mesh, param.placements
                )
                param.copy_(whole)
        return losses(model), losses(shard(torch_fsdp, stack()))

    for actual, native in run_ranks(check, 2):
        assert torch.equal(actual, native)


class Wide(ResidualBlock):
    """A block with 512 KB of parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8192), nn.Linear(8192, 8)


def test_peak_memory_of_materialization_is_the_shards_and_one_group():
    """Of 4 MB in 8 groups on 2 ranks, a rank allocates its shards and one whole group."""

    def check():
        import dist_rng

        def initialized(model):
            torch.manual_seed(0)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            return model

        def build():
            with torch.device("meta"):
                model = nn.Sequential(*[Wide() for _ in range(8)])
            for block in model:
                fsdp.fully_shard(block)
            fsdp.fully_shard(model).to_empty(device="cpu")
            dist_rng.install()
            return initialized(model)

        most, model = peak_bytes(build)
        alone = initialized(nn.Sequential(*[Wide() for _ in range(8)]))
        # the random numbers of one device, too
        for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), wanted)
        return most / sum(4 * param.numel() for param in alone.parameters())

    for most in run_ranks(check, 2):
        assert 0.5 <= most < 0.5 + 2 / 8


def test_casting_a_model_casts_its_sharded_parameters():
    def check():
        model = shard(fsdp, stack())
        model(batch(0)).sum().backward()
        model.zero_grad()
        before = [p.detach().full_tensor() for p in model.parameters()]
        model.double()
        for param, old in zip(model.parameters(), before, strict=True):
            assert param.dtype == torch.float64
            assert torch.equal(param.detach().full_tensor(), old.double())
        model(batch(0).double()).sum().backward()
        assert model[0].up.weight.grad.dtype == torch.float64

    run_ranks(check, 2)


def test_an_optimizer_step_in_backward_frees_each_gradient():
    def check():
        model = shard(fsdp, stack())
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        model(batch(0)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        plain = shard(fsdp, stack())
        plain(batch(0)).square().mean().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), wanted.full_tensor())

    run_ranks(check, 2)


def test_reset_iter_state_allows_training_after_an_error():
    def check():
        model = shard(fsdp, stack())
        fail = model[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(0))
        fail.remove()
        model.reset_iter_state()
        return losses(model), losses(shard(fsdp, stack()))

    for actual, wanted in run_ranks(check, 2):
        assert torch.equal(actual, wanted)


def test_unused_parameters_are_reduced_when_ranks_use_different_ones():
    def check():
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

        class Switch(nn.Module):
            def __init__(self):
                super().__init__()
                self.experts = model

            def forward(self, x):
                return self.experts["ab"[dist.get_rank()]](x)

        switch = fsdp.fully_shard(Switch())
        switch.set_reduce_scatter_unused_params(True)
        switch(torch.ones(1, 8)).sum().backward()
        for param in switch.parameters():
            assert torch.equal(param.grad.full_tensor(), torch.full(param.shape, 0.5))

    run_ranks(check, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_losses_of_compiled_blocks_are_close():  # the warning is dynamo's, with FSDP2 too
    def check():
        model = shard(fsdp, stack(2))
        for block in list(model)[:-1]:
            block.compile(backend="aot_eager")
        return losses(model), losses(shard(fsdp, stack(2)))

    for actual, wanted in run_ranks(check, 2, timeout=240):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_forward_runs_without_gradients_and_in_inference_mode():
    def check():
        model, plain = shard(fsdp, stack()), stack()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.testing.assert_close(model(batch(0)), plain(batch(0)))
        model(batch(0)).sum().backward()
        assert model[0].up.weight.grad is not None

    run_ranks(check, 2)


def test_llama_trains_with_gradient_checkpointing_of_transformers():
    def check():
        found = []
        for sharded in (True, False):
            model = models.llama()
            if sharded:
                for layer in model.model.layers:
                    fsdp.fully_shard(layer)
                fsdp.fully_shard(model)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it has another name in later versions
                    model.gradient_checkpointing_enable()
            found.append(models.train(model, steps=4))
        return found

    for actual, alone in run_ranks(check, 2, timeout=120):
        torch.testing.assert_close(actual, alone, rtol=1e-5, atol=1e-6)
