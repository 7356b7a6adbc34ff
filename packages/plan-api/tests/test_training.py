"""Unmodified models and a script for one device, on meshes: the same losses, dropout on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from plan_api import installed, parallelize, zoo
from testkit import TORCH_RELEASE, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        TORCH_RELEASE < (2, 12),
        reason="torch 2.11's DTensor flattens no two sharded dims (batch and heads)",
    ),
]


@dataclass(frozen=True)
class Case:
    """A model, its plan, and a script's loss on a batch.

    Attributes:
        make: the model, for one device.
        plan: of a mesh, by ``sp``.
        loss: draws a batch.
        lr: of AdamW.
        within: of one device's losses.
        axes: of the mesh.
    """

    make: Callable[[], nn.Module]
    plan: Callable[..., Any]
    loss: Callable[[Any], torch.Tensor]
    lr: float = 1e-3
    within: float = 1e-5
    axes: tuple[str, str] = ("dp", "tp")


def _image_loss(model):
    return model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.randint(0, 10, (4,))).loss


def _noise_loss(model):
    images, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    return model(images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), noise)


def _diffusion(mesh, sp):
    plan = zoo.dit(mesh, dp="dp", sp=sp).under("model")
    plan.shard("criterion.<in:target>", Shard(0), "dp")
    return plan.shard("<out>", [Replicate()] * 2)


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
    # The authors' learning rate; with a larger one the zeros that its gates begin with amplify
    # the rounding of a sum over ranks beyond 1e-5.
    "dit": Case(models.dit, _diffusion, _noise_loss, lr=1e-4),
}


def _parallel(case, shape, sp):
    """The losses of 20 steps, whether parameters began bit-equal, extras, and what went wrong."""
    import ragged_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=case.axes)
    model = parallelize(case.make(), case.plan(mesh, sp=sp))
    models.reinitialize(model)
    alone = case.make()
    models.reinitialize(alone)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    equal = all(torch.equal(ours.full_tensor(), theirs) for ours, theirs in pairs)
    with ragged_shard.strict():
        losses = models.train(model, case.loss, lr=case.lr)
    return losses, equal, installed(model).extras, installed(model).fired.never


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (2, 2)) for name in CASES),
        *((name, (1, 2)) for name in CASES if "parallel" not in name and "along ep" not in name),
    ],
    ids=str,
)
def test_it_trains_as_on_one_device(name, shape):
    """With sequence parallelism and without; parameters and dropout drawn on the mesh."""
    case = CASES[name]

    def check():
        return [_parallel(case, shape, sp) for sp in (False, True)]

    model = case.make()
    models.reinitialize(model)
    expected = models.train(model, case.loss, lr=case.lr)
    for both in run_ranks(check, shape[0] * shape[1], timeout=180):
        for losses, equal, extras, never in both:
            assert losses == pytest.approx(expected, abs=case.within, rel=0)
            assert equal
            assert extras == ("dist-rng", "dtensor-rules", "fused-comm")
            assert never == []


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
