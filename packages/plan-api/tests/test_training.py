"""Unmodified models and a script for one device, on meshes: the same losses, dropout on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]


@dataclass(frozen=True)
class Case:
    """A model, its plan, and a script's loss on a batch.

    Attributes:
        make: the model, for one device.
        plan: of a mesh, by ``sp``.
        loss: draws a batch.
        within: of one device's losses.
        axes: of the mesh.
    """

    make: Callable[[], nn.Module]
    plan: Callable[..., Any]
    loss: Callable[[Any], torch.Tensor]
    within: float = 1e-5
    axes: tuple[str, str] = ("dp", "tp")


def _image_loss(model):
    return model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.randint(0, 10, (4,))).loss


def _noise_loss(model):
    images, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    return model(images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), noise)


def _diffusion(mesh, sp):
    plan = zoo.dit(mesh, dp="dp", sp=sp).under("model")
    plan.redistribute("criterion.<in:target>", Replicate(), Shard(0), "dp")
    plan.annotate("criterion.<op:mse_loss>", Shard(0), "dp")
    return plan.redistribute("<out>", Partial(), Replicate(), "dp")


def _experts_alone(mesh, sp, **options):
    """There is no axis to cut the sequence along."""
    return zoo.mixtral(mesh, tp=None, ep="ep", **options)


CASES = {
    "llama": Case(
        partial(models.llama, attention_dropout=0.1), partial(zoo.llama, dp="dp"), models.token_loss
    ),
    "llama, tied, 67 tokens, loss parallel": Case(
        partial(models.llama, attention_dropout=0.1, vocab_size=67, tie_word_embeddings=True),
        partial(zoo.llama, dp="dp", loss_parallel=True),
        models.token_loss,
    ),
    "gpt2": Case(models.gpt2, partial(zoo.gpt2, dp="dp"), models.token_loss),
    "gpt2, loss parallel": Case(
        models.gpt2, partial(zoo.gpt2, dp="dp", loss_parallel=True), models.token_loss
    ),
    # Its routing amplifies.
    "mixtral": Case(
        partial(models.mixtral, attention_dropout=0.1),
        partial(zoo.mixtral, dp="dp"),
        models.token_loss,
        within=6e-5,
    ),
    "mixtral, 3 experts divided along tp": Case(
        partial(models.mixtral, attention_dropout=0.1, num_local_experts=3),
        partial(zoo.mixtral, dp="dp", ep="tp"),
        models.token_loss,
        within=6e-5,
    ),
    "mixtral, experts on an axis of their own": Case(
        partial(models.mixtral, attention_dropout=0.1),
        partial(_experts_alone, dp="dp"),
        models.token_loss,
        within=6e-5,
        axes=("dp", "ep"),
    ),
    "mixtral, 3 experts divided along ep and cut along tp": Case(
        partial(models.mixtral, attention_dropout=0.1, num_local_experts=3),
        partial(zoo.mixtral, ep="ep"),
        models.token_loss,
        within=6e-5,
        axes=("ep", "tp"),
    ),
    "vit": Case(models.vit, partial(zoo.vit, dp="dp"), _image_loss),
    "dit": Case(models.dit, _diffusion, _noise_loss),
}


FOUR_RANKS = {name for name in CASES if "loss parallel" in name or "along ep" in name}


@dataclass(frozen=True)
class Trained:
    """What became of a model.

    Attributes:
        losses: of 20 steps.
        norms: of the gradients of one more batch; an optimizer like Adam hides a factor.
        equal: whether parameters began as one device's, bit for bit.
        extras: of the other packages, those that took part.
        never: entries of the plan that did nothing.
    """

    losses: list[float]
    norms: list[float]
    equal: bool = True
    extras: tuple[str, ...] = ()
    never: list[str] = field(default_factory=list)


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
    equal = all(torch.equal(ours.full_tensor(), theirs) for ours, theirs in pairs)
    with ragged_shard.strict():
        losses, norms = _train(model, case)
    state = installed(model)
    return Trained(losses, norms, equal, state.extras, [str(one) for one in state.fired.never])


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_they_train_as_on_one_device(shape):
    """With sequence parallelism and without; parameters and dropout drawn on the mesh.

    All in one call: what torch's DTensor decides about an operator, which is most of the time of a
    first step, is forgotten between calls.
    """
    names = [name for name in CASES if shape == (2, 2) or name not in FOUR_RANKS]

    def check():
        meshes = {
            axes: init_device_mesh("cpu", shape, mesh_dim_names=axes)
            for axes in {CASES[name].axes: None for name in names}
        }
        return {
            (name, sp): _parallel(CASES[name], meshes[CASES[name].axes], sp)
            for name in names
            for sp in (False, True)
        }

    expected = {name: _train(_alone(CASES[name]), CASES[name]) for name in names}
    for found in run_ranks(check, shape[0] * shape[1], timeout=480):
        for (name, sp), ours in found.items():
            losses, norms = expected[name]
            said = f"{name}, {sp=}"
            within = CASES[name].within
            assert ours.losses == pytest.approx(losses, abs=within, rel=0), said
            assert ours.norms == pytest.approx(norms, abs=1e-6, rel=0.01), said
            assert ours.equal, said
            assert ours.extras == ("dist-rng", "dtensor-rules", "fused-comm"), said
            assert ours.never == [], said


def test_dropout_is_on(monkeypatch):
    """Without it the losses are others, so the cases above do test it."""
    for name, case in CASES.items():
        model = case.make()
        models.reinitialize(model)
        on = models.train(model, case.loss, steps=1 if name != "dit" else 3)
        monkeypatch.setattr(nn.functional, "dropout", lambda x, *args, **options: x)
        off_model = case.make()
        models.reinitialize(off_model)
        assert models.train(off_model, case.loss, steps=1 if name != "dit" else 3) != on
        monkeypatch.undo()
