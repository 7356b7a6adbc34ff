"""SOAP in the trainer: one device's losses, as far as rounding lets the eigenvectors be the same.

The gradient of a matrix of r x c has at most min(r, c) singular values that are not zero, so that
one of its preconditioners has eigenvectors that only rounding determines, and SOAP's updates depend
on them: losses differ by up to 6e-4 from the third step on, in float64 as well, and by up to 1.1e-3
with experts, whose router is such a matrix. In blocks that are square (32 x 32, with 32 experts)
the eigenvectors are determined, and losses in float64 are within 2e-12.
"""

import functools
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import MixtralConfig

from integration.train.config import TrainConfig
from testkit import run_ranks

STEPS = 6
TOLERANCE = {"llama-tiny": 1e-3, "mixtral-tiny": 2e-3}
OF_FLOAT64 = 1e-11
PRODUCTS = {
    "ddp": {"system": "ddp"},
    "fsdp2": {"system": "fsdp2"},
    "fsdp": {"system": "fsdp"},
    "plan, FSDP": {"system": "plan", "dp_shard": 2},
    "plan, ZeRO-3 by phases": {"system": "plan", "dp_shard": 2, "zero3": True},
    "plan, static CP": {"system": "plan", "cp": 2, "static": True},
    "plan, TP": {"system": "plan", "tp": 2},
    "plan, TP x SP, static": {"system": "plan", "tp": 2, "sp": True, "static": True},
    "plan, EP": {"system": "plan", "dp_shard": 2, "ep": 2, "model": "mixtral-tiny"},
    "plan, PP": {"system": "plan", "pp_degree": 2},
}
# Each package's way to shard, both modes, and experts.
FAST = ("fsdp", "plan, ZeRO-3 by phases", "plan, TP x SP, static", "plan, EP")
# Of which gradients are reduced in float64.
EXACT = ("ddp", "plan, FSDP", "plan, ZeRO-3 by phases", "plan, TP")
EXACT_WITH_EXPERTS = ("plan, FSDP", "plan, EP")
EXPERTS = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "num_local_experts": 32, "sliding_window": None,
}  # fmt: skip
RUN = {"optimizer": "soap", "micro_batch": 2}


@pytest.fixture(scope="module")
def one_device(train_runs, tmp_path_factory):
    models = ("llama-tiny", "mixtral-tiny")
    runs = [RUN | {"model": model} for model in models]
    losses = train_runs(1, runs, out=tmp_path_factory.mktemp("one"), steps=STEPS)
    return dict(zip(models, losses, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in PRODUCTS],
)
def test_losses_are_those_of_one_device(name, train_runs, one_device, tmp_path):
    run = RUN | PRODUCTS[name]
    (losses,) = train_runs(2, [run], out=tmp_path, steps=STEPS)
    model = run.get("model", "llama-tiny")
    expected = one_device[model]
    assert losses == pytest.approx(expected, rel=0, abs=TOLERANCE[model])
    assert losses[:2] == pytest.approx(expected[:2], rel=0, abs=1e-5)  # before the first update


def _exact_losses(product, out):
    """Trains in float64, RMSNorm and loss included, with SOAP of square blocks."""
    import torch.distributed as dist
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

    import fsdp.optim
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.model import parallel_model
    from integration.train.session import restore_torch
    from integration.train.setup import prepare

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, True) + self.variance_epsilon))

    def single(tensor):
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)

    def build(*args, **options):
        model = native_build(*args, **options).double()
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
        return model

    native_build, soap = parallel_model.build_model, fsdp.optim.SOAP
    restore_torch()
    world = World(dist.get_rank(), dist.get_world_size())
    config = TrainConfig(
        **RUN | {"model": "llama-tiny", "out": out, "resume": "never", "steps": STEPS} | product
    )
    with ExitStack() as stack:
        for target, name, value in (
            (parallel_model, "build_model", build),
            (fsdp.optim, "SOAP", functools.partial(soap, block_size=32)),
            (LlamaRMSNorm, "forward", norm),
            (MixtralRMSNorm, "forward", norm),
            (torch.Tensor, "float", single),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        trainer, losses = Trainer(prepare(config, world.size), world), []
        for _ in range(STEPS):
            loss = trainer.train_step()
            dist.all_reduce(loss)
            losses.append(loss.item() / world.size)
    return losses


@pytest.mark.ranks
@pytest.mark.slow
def test_losses_in_float64_are_equal_where_eigenvectors_are_determined(tmp_path):
    expected = run_ranks(_exact_losses, 1, {}, tmp_path)[0]
    assert expected[0] - expected[-1] > 0.1
    for name in EXACT:
        losses = run_ranks(_exact_losses, 2, PRODUCTS[name], tmp_path)[0]
        assert losses == pytest.approx(expected, rel=0, abs=OF_FLOAT64), name


@pytest.mark.ranks
@pytest.mark.slow
def test_losses_of_experts_in_float64_are_equal_where_eigenvectors_are_determined(tmp_path):
    MixtralConfig(**EXPERTS).save_pretrained(tmp_path)
    run = {"model": str(tmp_path / "config.json"), "global_batch": 32, "micro_batch": 8}
    expected = run_ranks(_exact_losses, 1, run, tmp_path)[0]
    assert expected[0] - expected[-1] > 0.1
    for name in EXACT_WITH_EXPERTS:
        losses = run_ranks(_exact_losses, 2, PRODUCTS[name] | run, tmp_path)[0]
        assert losses == pytest.approx(expected, rel=0, abs=OF_FLOAT64), name


@pytest.mark.ranks
def test_a_checkpoint_resumes_on_another_number_of_ranks(train_runs, one_device, tmp_path):
    first = RUN | {"system": "fsdp", "save_at": 3, "out": tmp_path / "run"}
    train_runs(2, [first], out=tmp_path, steps=3)
    path = Path(tmp_path / "run" / "checkpoints" / "step-00000003")
    (losses,) = train_runs(1, [RUN | {"resume": str(path)}], out=tmp_path / "new", steps=STEPS)
    assert losses == pytest.approx(one_device["llama-tiny"][3:], rel=0, abs=TOLERANCE["llama-tiny"])
