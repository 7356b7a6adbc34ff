"""Mixtral of transformers (`MixtralForCausalLM`)."""

from __future__ import annotations

import itertools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.spec.placements import interleaved_shard
from plan_api.zoo.llama import decoder
from plan_api.zoo.requirements import Axes, ExpertAxes, check_options, expert_axes, names_of

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
    """Extends LLaMA's plan to experts, which are sharded by number, or each along ``tp``.

    transformers loops over the experts that tokens chose, whose number depends on the data, so they
    run on local tensors (`Plan.local`). Along an axis of ``ep`` that shards tokens, each rank
    dispatches its tokens to the experts that they chose (`Plan.dispatch`); along another one all
    ranks have the same tokens, and each computes the outputs of its experts.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: the axis along which experts are sharded by number, or several; ``tp`` may be among
            them, and otherwise shards each expert. Tokens are dispatched along axes of ``dp``, and
            along ``tp`` under ``sp``. Ranks may have different numbers of experts, but not none.
            None: all ranks have a part of each expert.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`; or tokens are sharded along some axes of ``ep`` only.
        ImportError: ``tp`` shards each expert, without ragged-shard, which shards the fused gate
            and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel)
    whole, part, axes = Replicate(), Partial(), expert_axes("mixtral", tp, dp, sp, ep)
    # Where parts of the sequence are dispatched the whole MLP, with its router, runs on them.
    plan = decoder(mesh, tp, dp, sp, loss_parallel, None if tp in axes.dispatched else whole)
    if names_of(dp) and tp not in axes.dispatched:  # there routers run on local tensors
        plan.annotate("<out:router_logits>", [Shard(0)] * len(names_of(dp)), names_of(dp))
    # The router is replicated, so gradients are summed at the inputs of the experts.
    for axis, at in itertools.product(axes.summed, ("<in:0>", "<in:top_k_weights>")):
        plan.redistribute(f"{_EXPERTS}.{at}", whole, whole, axis, grad_src=part, grad_dst=whole)
    if tp is not None and tp not in axes.sharded:
        plan.shard(rf"{_EXPERTS}\.gate_up_proj", interleaved_shard(1, 2, "mixtral"), tp)
        plan.shard(rf"{_EXPERTS}\.down_proj", Shard(2), tp)
    plan.annotate(rf"{_EXPERTS}\..*\.grad", [part] * len(axes.replicated), axes.replicated)
    if axes.sharded:
        return _expert_parallel(plan, axes, tp)
    # Without parts to sum only the batch is sharded, or nothing.
    along = axes.summed or names_of(dp) or plan.axes
    placement = part if axes.summed else Shard(0) if dp else whole
    return plan.local(_EXPERTS, [placement] * len(along), along)


def _expert_parallel(plan: Plan, axes: ExpertAxes, tp: str | None) -> Plan:
    """Adds experts sharded by number, and the combination of their outputs."""
    part, shard = Partial(), [Shard(0)] * len(axes.sharded)
    choices = f"{_EXPERTS}.<in:top_k_index>"
    plan.shard(rf"{_EXPERTS}\.(gate_up|down)_proj", shard, axes.sharded)
    if not axes.dispatched:
        plan.index(choices, shard, axes.sharded, count="num_experts", flag="_is_expert_parallel")
        for axis in (axis for axis in axes.sharded if axis != tp):
            plan.redistribute(f"{_MLP}.<out>", part, Replicate(), axis)
        return plan.local(_EXPERTS, [part] * len(axes.summed), axes.summed)
    plan.dispatch(choices, shard, axes.sharded, weights="top_k_weights", count="num_experts")
    if tp in axes.dispatched:
        plan.annotate(rf"{_MLP}\.gate\.weight\.grad", part, tp)
        return plan.local(_MLP, Shard(1), tp)
    placed = shard + [part] * len(axes.summed)
    return plan.local(_EXPERTS, placed, [*axes.dispatched, *axes.summed])
