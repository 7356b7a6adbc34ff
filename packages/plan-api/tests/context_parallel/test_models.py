"""Experts, latent attention, windows and sinks on sharded sequences train as on one device."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from plan_api import describe_masks, installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

# The auxiliary loss of routers is large, so that a wrong one is no rounding.
MIXTRAL = partial(models.mixtral, output_router_logits=True, router_aux_loss_coef=0.5)
DEEPSEEK, DENSE = partial(models.deepseek_v3, v_head_dim=6), {"dense": 1}


@dataclass(frozen=True)
class Case:
    """A model and its plan.

    Attributes:
        make: the model.
        plan: of the zoo.
        options: of the plan.
        axes: of the mesh, each of two ranks.
    """

    make: Any
    plan: Any
    options: dict[str, Any] = field(default_factory=dict)
    axes: tuple[str, ...] = ("cp",)


CASES = {
    "mixtral": Case(MIXTRAL, zoo.mixtral),
    "mixtral, experts along cp": Case(MIXTRAL, zoo.mixtral, {"ep": "cp"}),
    "deepseek_v3": Case(DEEPSEEK, zoo.deepseek_v3, DENSE),
    "gemma3": Case(models.gemma3, zoo.gemma3),
    "gpt_oss": Case(models.gpt_oss, zoo.gpt_oss, {"ep": "cp"}),
}
SLOW = {
    "mixtral, ulysses": Case(MIXTRAL, zoo.mixtral, {"cp_method": "ulysses"}),
    "qwen3_moe": Case(models.qwen3_moe, zoo.qwen3_moe, {"ep": "cp"}),
    "deepseek_v3, all-gather": Case(
        DEEPSEEK, zoo.deepseek_v3, DENSE | {"ep": "cp", "cp_method": "all-gather"}
    ),
    "deepseek_v3, ulysses": Case(DEEPSEEK, zoo.deepseek_v3, DENSE | {"cp_method": "ulysses"}),
    "gemma3, all-gather": Case(models.gemma3, zoo.gemma3, {"cp_method": "all-gather"}),
    "gemma3, contiguous": Case(models.gemma3, zoo.gemma3, {"cp_order": "contiguous"}),
    "gpt_oss, ulysses": Case(models.gpt_oss, zoo.gpt_oss, {"cp_method": "ulysses"}),
}
DATA, TENSOR = ("dp", "cp"), ("cp", "tp")
OF_FOUR = {
    "mixtral beside dp": Case(MIXTRAL, zoo.mixtral, {"dp": "dp"}, DATA),
    "mixtral, experts along dp": Case(MIXTRAL, zoo.mixtral, {"dp": "dp", "ep": "dp"}, DATA),
    "mixtral, experts along dp and cp": Case(
        MIXTRAL, zoo.mixtral, {"dp": "dp", "ep": ("dp", "cp")}, DATA
    ),
    "mixtral beside tp": Case(MIXTRAL, zoo.mixtral, {"tp": "tp"}, TENSOR),
    "mixtral, experts along tp": Case(MIXTRAL, zoo.mixtral, {"tp": "tp", "ep": "tp"}, TENSOR),
    "mixtral, experts along cp and each along tp": Case(
        MIXTRAL, zoo.mixtral, {"tp": "tp", "ep": "cp"}, TENSOR
    ),
    "mixtral, all sharded": Case(
        MIXTRAL,
        zoo.mixtral,
        {"tp": "tp", "sp": True, "ep": ("cp", "tp"), "loss_parallel": True},
        TENSOR,
    ),
    "deepseek_v3, experts along dp and cp": Case(
        DEEPSEEK, zoo.deepseek_v3, DENSE | {"dp": "dp", "ep": ("dp", "cp")}, DATA
    ),
    "gemma3 beside tp": Case(models.gemma3, zoo.gemma3, {"tp": "tp", "sp": True}, TENSOR),
    "gpt_oss, experts along dp and cp": Case(
        models.gpt_oss, zoo.gpt_oss, {"dp": "dp", "ep": ("dp", "cp")}, DATA
    ),
    "gpt_oss beside tp": Case(models.gpt_oss, zoo.gpt_oss, {"tp": "tp"}, TENSOR),
    "gpt_oss, all sharded": Case(
        models.gpt_oss,
        zoo.gpt_oss,
        {"tp": "tp", "sp": True, "ep": ("cp", "tp"), "loss_parallel": True},
        TENSOR,
    ),
    "gpt_oss, experts along cp and each along tp": Case(
        models.gpt_oss, zoo.gpt_oss, {"tp": "tp", "ep": "cp", "cp_method": "all-gather"}, TENSOR
    ),
    "deepseek_v3 beside tp": Case(
        DEEPSEEK, zoo.deepseek_v3, DENSE | {"tp": "tp", "sp": True}, TENSOR
    ),
}


def loss_of(model):
    """Returns the loss of sequences of 16 tokens; the last one is padded at its end."""
    ids = torch.randint(0, models.VOCABULARY, (4, 16))
    labels = ids.clone()
    labels[-1, 9:] = -100
    return model(input_ids=ids, labels=labels).loss


def trained(model):
    """Returns the losses of 4 steps, and the norms of the gradients of one more batch."""
    losses = models.train(model, loss_of)
    loss_of(model).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return losses, [grad.norm().item() for grad in whole]


def compare(cases, ranks):
    def check():
        found = {}
        for name, case in cases.items():
            mesh = init_device_mesh("cpu", (2,) * len(case.axes), mesh_dim_names=case.axes)
            for mode in ("eager", "static"):
                plan = case.plan(mesh, cp="cp", **{"tp": None} | case.options)
                model = parallelize(describe_masks(case.make()), plan, mode=mode)
                result = trained(model)
                never = [str(site) for site in installed(model).coverage.unused_sites]
                found[name, mode] = result, never
        return found

    expected = {name: trained(case.make()) for name, case in cases.items()}
    for found in run_ranks(check, ranks, timeout=400):
        for (name, mode), ((losses, norms), never) in found.items():
            of_one, norms_of_one = expected[name]
            assert losses == pytest.approx(of_one, abs=6e-5, rel=0), (name, mode)
            assert norms == pytest.approx(norms_of_one, abs=1e-6, rel=1e-4), (name, mode)
            assert never == [], (name, mode)


@pytest.mark.slow
def test_models_train_as_on_one_device():
    """In both modes, of which static mode compares its first step with Eager."""
    compare(CASES, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_products_train_as_on_one_device(ranks):
    compare(SLOW if ranks == 2 else OF_FOUR, ranks)


def test_experts_along_an_axis_that_shards_no_tokens_are_refused(mesh):
    with pytest.raises(ValueError, match=r"'dp' that do and 'tp' that do not.*by dp or cp"):
        zoo.mixtral(mesh, cp="dp", ep=("dp", "tp"))
