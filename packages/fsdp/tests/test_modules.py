"""Where modules come from and what becomes of them: meta, casts, errors, compile, eval."""

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


def test_it_begins_on_meta_without_a_full_copy():
    def check():
        with torch.device("meta"):
            model = nn.Sequential(*[ResidualBlock() for _ in range(3)], nn.Linear(8, 4))
        shard(fsdp, model)
        assert all(param.device.type == "meta" for param in model.parameters())
        model.to_empty(device="cpu")
        full = stack()
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held < 0.6 * sum(p.numel() for p in full.parameters())
        with torch.no_grad():
            for param, value in zip(model.parameters(), full.parameters(), strict=True):
                whole = torch.distributed.tensor.distribute_tensor(
                    value.detach(), param.device_mesh, param.placements
                )
                param.copy_(whole)
        return losses(model), losses(shard(torch_fsdp, stack()))

    for ours, theirs in run_ranks(check, 2):
        assert torch.equal(ours, theirs)


class Wide(ResidualBlock):
    """512 KB of parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8192), nn.Linear(8192, 8)


def test_on_meta_a_rank_never_holds_more_than_its_shards_and_a_group():
    """Of 4 MB in 8 groups on 2 ranks: shards, and a group that is being taken over."""

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


def test_casting_a_model_casts_its_shards():
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


def test_after_an_error_training_goes_on():
    def check():
        model = shard(fsdp, stack())
        fail = model[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(0))
        fail.remove()
        model.reset_iter_state()
        return losses(model), losses(shard(fsdp, stack()))

    for ours, wanted in run_ranks(check, 2):
        assert torch.equal(ours, wanted)


def test_ranks_that_use_different_parameters():
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
def test_torch_compile_of_blocks():  # dynamo looks at it where the graph breaks, as with FSDP2
    def check():
        model = shard(fsdp, stack())
        for block in list(model)[:-1]:
            block.compile(backend="aot_eager")
        return losses(model), losses(shard(fsdp, stack()))

    for ours, wanted in run_ranks(check, 2, timeout=240):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_it_runs_in_eval_and_without_gradients():
    def check():
        model, plain = shard(fsdp, stack()), stack()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.testing.assert_close(model(batch(0)), plain(batch(0)))
        model(batch(0)).sum().backward()
        assert model[0].up.weight.grad is not None

    run_ranks(check, 2)


def test_llama_checkpointed_by_transformers():
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

    for ours, alone in run_ranks(check, 2, timeout=120):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
