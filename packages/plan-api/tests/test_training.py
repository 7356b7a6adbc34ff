"""Unmodified models and a script for one device, on meshes: the same losses, dropout on."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from plan_api import installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks
from testkit.models import Training

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

CASES = {
    "llama": Training(partial(models.llama, attention_dropout=0.1), partial(zoo.llama, dp="dp")),
    "llama, tied, 67 tokens, loss parallel": Training(
        partial(models.llama, attention_dropout=0.1, vocab_size=67, tie_word_embeddings=True),
        partial(zoo.llama, dp="dp", loss_parallel=True),
    ),
    "qwen3": Training(partial(models.qwen3, attention_dropout=0.1), partial(zoo.qwen3, dp="dp")),
    "gemma3": Training(partial(models.gemma3, attention_dropout=0.1), partial(zoo.gemma3, dp="dp")),
    "gemma3, 67 tokens, loss parallel": Training(
        partial(models.gemma3, attention_dropout=0.1, vocab_size=67),
        partial(zoo.gemma3, dp="dp", loss_parallel=True),
    ),
    "gpt2": Training(models.gpt2, partial(zoo.gpt2, dp="dp")),
    "gpt2, loss parallel": Training(models.gpt2, partial(zoo.gpt2, dp="dp", loss_parallel=True)),
    # Its routing amplifies.
    "mixtral": Training(
        partial(models.mixtral, attention_dropout=0.1),
        partial(zoo.mixtral, dp="dp"),
        within=6e-5,
    ),
    "mixtral, 3 experts divided along tp": Training(
        partial(models.mixtral, attention_dropout=0.1, num_local_experts=3),
        partial(zoo.mixtral, dp="dp", ep="tp"),
        within=6e-5,
    ),
    "mixtral, experts on an axis of their own": Training(
        partial(models.mixtral, attention_dropout=0.1),
        lambda mesh, sp: zoo.mixtral(mesh, tp=None, dp="dp", ep="ep"),
        within=6e-5,
        axes=("dp", "ep"),
    ),
    "mixtral, 3 experts divided along ep and cut along tp": Training(
        partial(models.mixtral, attention_dropout=0.1, num_local_experts=3),
        partial(zoo.mixtral, ep="ep"),
        within=6e-5,
        axes=("ep", "tp"),
    ),
    "qwen3_moe": Training(
        partial(models.qwen3_moe, attention_dropout=0.1),
        partial(zoo.qwen3_moe, dp="dp"),
        within=6e-5,
    ),
    "gpt_oss": Training(
        partial(models.gpt_oss, attention_dropout=0.1), partial(zoo.gpt_oss, dp="dp"), within=6e-5
    ),
    "gpt_oss, 3 experts divided along tp": Training(
        partial(models.gpt_oss, attention_dropout=0.1, num_local_experts=3),
        partial(zoo.gpt_oss, dp="dp", ep="tp"),
        within=6e-5,
    ),
    "gpt_oss, 3 experts divided along ep and cut along tp": Training(
        partial(models.gpt_oss, attention_dropout=0.1, num_local_experts=3),
        partial(zoo.gpt_oss, ep="ep"),
        within=6e-5,
        axes=("ep", "tp"),
    ),
    "deepseek_v3": Training(
        partial(models.deepseek_v3, attention_dropout=0.1),
        partial(zoo.deepseek_v3, dp="dp", dense=1),
        within=6e-5,
    ),
    "deepseek_v3, experts divided along tp": Training(
        partial(models.deepseek_v3, attention_dropout=0.1),
        partial(zoo.deepseek_v3, dp="dp", ep="tp", dense=1, loss_parallel=True),
        within=6e-5,
    ),
    "deepseek_v3, experts divided along ep and cut along tp": Training(
        partial(models.deepseek_v3, attention_dropout=0.1),
        partial(zoo.deepseek_v3, ep="ep", dense=1),
        within=6e-5,
        axes=("ep", "tp"),
    ),
    "vit": Training(models.vit, partial(zoo.vit, dp="dp"), models.image_loss),
}


FOUR_RANKS = [name for name in CASES if "loss parallel" in name or "along ep" in name]
# Meshes, and what trains on each: cases, with sequence parallelism or without.
RUNS = {
    "1 x 2": ((1, 2), [(name, True) for name in CASES if name not in FOUR_RANKS]),
    "2 x 2": ((2, 2), [("llama", False), *((name, True) for name in FOUR_RANKS)]),
    "2 x 2, all": ((2, 2), [(name, sp) for name in CASES for sp in (False, True)]),
}


@dataclass(frozen=True)
class Trained:
    """What became of a model.

    Attributes:
        losses: of 4 steps.
        norms: of the gradients of one more batch; an optimizer like Adam hides a factor.
        equal: whether parameters began as one device's, bit for bit.
        extras: of the other packages, those that took part.
        unused_sites: sites of the plan that no call passed.
    """

    losses: list[float]
    norms: list[float]
    equal: bool = True
    extras: tuple[str, ...] = ()
    unused_sites: list[str] = field(default_factory=list)


def _train(model, case):
    losses = models.train(model, case.loss)
    case.loss(model).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return losses, [grad.norm().item() for grad in whole]


def _alone(case):
    model = case.make()
    models.reinitialize(model)
    return model


def _parallel(case, mesh, sp):
    import ragged_shard

    model = parallelize(case.make(), case.plan(mesh, sp=sp))
    models.reinitialize(model)
    pairs = zip(model.parameters(), _alone(case).parameters(), strict=True)
    equal = all(torch.equal(actual.full_tensor(), native) for actual, native in pairs)
    with ragged_shard.strict():
        losses, norms = _train(model, case)
    state = installed(model)
    return Trained(
        losses, norms, equal, state.extras, [str(one) for one in state.coverage.unused_sites]
    )


@pytest.mark.parametrize(
    "case",
    ["1 x 2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("2 x 2", "2 x 2, all"))],
)
def test_models_of_the_zoo_train_as_on_one_device(case):
    """Parameters and dropout are drawn on the mesh.

    All in one call: what torch's DTensor decides about an operator, which is most of the time of a
    first step, is forgotten between calls.
    """
    shape, runs = RUNS[case]
    names = {name: None for name, _ in runs}

    def check():
        meshes = {
            axes: init_device_mesh("cpu", shape, mesh_dim_names=axes)
            for axes in {CASES[name].axes: None for name in names}
        }
        return {
            (name, sp): _parallel(CASES[name], meshes[CASES[name].axes], sp) for name, sp in runs
        }

    expected = {name: _train(_alone(CASES[name]), CASES[name]) for name in names}
    for found in run_ranks(check, shape[0] * shape[1], timeout=480):
        for (name, sp), actual in found.items():
            losses, norms = expected[name]
            message = f"{name}, {sp=}"
            within = CASES[name].within
            assert actual.losses == pytest.approx(losses, abs=within, rel=0), message
            assert actual.norms == pytest.approx(norms, abs=1e-6, rel=0.01), message
            assert actual.equal, message
            assert actual.extras == ("dist-rng", "dtensor-rules", "fused-comm"), message
            assert actual.unused_sites == [], message


@pytest.mark.slow
def test_dropout_is_enabled(monkeypatch):
    """Without it the losses are others, so the cases above do test it."""
    for case in CASES.values():
        model = case.make()
        models.reinitialize(model)
        on = models.train(model, case.loss, steps=1)
        monkeypatch.setattr(nn.functional, "dropout", lambda x, *args, **options: x)
        off_model = case.make()
        models.reinitialize(off_model)
        assert models.train(off_model, case.loss, steps=1) != on
        monkeypatch.undo()
