"""Mixtral of transformers (`MixtralForCausalLM`)."""

from __future__ import annotations

import itertools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.spec.plan import Plan
from plan_api.zoo.llama import decoder
from plan_api.zoo.needs import Axes, ExpertAxes, check_options, expert_axes, fused, names_of

__all__ = ["mixtral"]

_MLP, _EXPERTS = r".*\.mlp", r".*\.mlp\.experts"


def mixtral(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    ep: Axes = None,
    loss_parallel: bool = False,
) -> Plan:
    """LLaMA's plan, and experts that are divided among ranks, or cut within.

    transformers' experts loop over those that are hit, whose number depends on the data, so they
    run on local tensors (`Plan.local`). Along an axis of ``ep`` that cuts tokens, each rank has its
    own, and sends them to the experts that they have chosen (`Plan.dispatch`); along another one
    all ranks have the same tokens, and each computes what its experts make of them.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: the axis along which experts are divided, or several, each expert whole on one of its
            ranks where ``tp`` is among them; beside another ``tp`` they are cut within along that.
            Tokens are sent along axes of ``dp``, and along ``tp`` under ``sp``. There may be more
            experts on some ranks than on others, but not none. None: all ranks have a part of each.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`; or tokens are cut along some axes of ``ep`` and not along others.
        ImportError: a ``tp`` that cuts experts within, without ragged-shard, which cuts the fused
            gate and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel)
    whole, part, axes = Replicate(), Partial(), expert_axes("mixtral", tp, dp, sp, ep)
    # Where the sequence's parts are sent the whole MLP, router included, runs on this rank's.
    plan = decoder(mesh, tp, dp, sp, loss_parallel, None if tp in axes.sent else whole)
    # The router goes on alike on all ranks, so gradients are summed where experts begin.
    for axis, given in itertools.product(axes.summed, (0, "top_k_weights")):
        begin = f"{_EXPERTS}.<in:{given}>"
        plan.redistribute(begin, whole, whole, axis, grad_src=part, grad_dst=whole)
    if tp is not None and tp not in axes.along:
        plan.shard(rf"{_EXPERTS}\.gate_up_proj", fused(1, 2, "mixtral"), tp)
        plan.shard(rf"{_EXPERTS}\.down_proj", Shard(2), tp)
    plan.annotate(rf"{_EXPERTS}\..*\.grad", [part] * len(axes.left), axes.left)
    if axes.along:
        return _divided(plan, axes, tp)
    if data := [] if axes.summed else names_of(dp):  # the batch alone is cut, and they are local
        return plan.local(_EXPERTS, [Shard(0)] * len(data), data)
    return plan.local(_EXPERTS, [part] * len(axes.summed), axes.summed)


def _divided(plan: Plan, axes: ExpertAxes, tp: str | None) -> Plan:
    """Experts are divided along axes, and told so; what they make of tokens is put together."""
    part, cut = Partial(), [Shard(0)] * len(axes.along)
    choices = f"{_EXPERTS}.<in:top_k_index>"
    plan.shard(rf"{_EXPERTS}\.(gate_up|down)_proj", cut, axes.along)
    if not axes.sent:
        plan.index(choices, cut, axes.along, count="num_experts", flag="_is_expert_parallel")
        for axis in (axis for axis in axes.along if axis != tp):
            plan.redistribute(f"{_MLP}.<out>", part, Replicate(), axis)
        return plan.local(_EXPERTS, [part] * len(axes.summed), axes.summed)
    plan.dispatch(choices, cut, axes.along, weights="top_k_weights", count="num_experts")
    if tp in axes.sent:
        plan.annotate(rf"{_MLP}\.gate\.weight\.grad", part, tp)
        return plan.local(_MLP, Shard(1), tp)
    placed = cut + [part] * len(axes.summed)
    return plan.local(_EXPERTS, placed, [*axes.sent, *axes.summed])
