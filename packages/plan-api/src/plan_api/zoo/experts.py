"""The entries that mixtures of experts share: a replicated router, and experts on local tensors.

transformers loops over the experts that tokens chose, whose number depends on the data, so they run
on local tensors (`Plan.local`). Along an axis that shards experts and tokens, each rank dispatches
its tokens to the experts that they chose (`Plan.dispatch`); along another one all ranks have the
same tokens, and each computes the outputs of its experts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.spec.placements import interleaved_shard
from plan_api.zoo.requirements import Axes, ExpertAxes, names_of

__all__ = ["ExpertNames", "add_experts", "shard_gated_experts"]


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture of experts in a model of transformers.

    Attributes:
        mlp: pattern of the MLPs that consist of a router and ``experts``.
        router: name of the router in such an MLP.
        index: argument of the experts that has the choices of tokens.
        weights: argument of the experts that has the weights of choices.
    """

    mlp: str = r".*\.mlp"
    router: str = "gate"
    index: str = "top_k_index"
    weights: str = "top_k_weights"

    @property
    def experts(self) -> str:
        """Pattern of the experts."""
        return rf"{self.mlp}\.experts"


def shard_gated_experts(plan: Plan, names: ExpertNames, tp: str, name: str) -> None:
    """Shards each expert along ``tp``: fused gate and up projections, and down projections.

    Args:
        plan: to which entries are added.
        names: of the experts, whose projections have (experts, out, in).
        tp: the axis.
        name: of the plan, for messages.

    Raises:
        ImportError: ragged-shard is not installed, which shards fused projections.
    """
    plan.shard(rf"{names.experts}\.gate_up_proj", interleaved_shard(1, 2, name), tp)
    plan.shard(rf"{names.experts}\.down_proj", Shard(2), tp)


def add_experts(
    plan: Plan, axes: ExpertAxes, names: ExpertNames, tp: str | None, dp: Axes, *, output: str = ""
) -> Plan:
    """Runs experts on local tensors, sharded by number along ``axes.sharded``.

    Args:
        plan: to which entries are added, with those for projections that ``tp`` shards.
        axes: of the mixture.
        names: of the mixture.
        tp: as in the plans' options.
        dp: as in the plans' options.
        output: pattern of the modules whose outputs are summed along axes of experts that shard
            nothing else; by default the MLPs.

    Returns:
        the plan.
    """
    whole, part, experts = Replicate(), Partial(), names.experts
    # The router is replicated, so gradients are summed at the inputs of the experts.
    for axis, at in itertools.product(axes.summed, ("<in:0>", f"<in:{names.weights}>")):
        plan.redistribute(f"{experts}.{at}", whole, whole, axis, grad_src=part, grad_dst=whole)
    plan.annotate(rf"{experts}\..*\.grad", [part] * len(axes.replicated), axes.replicated)
    if axes.sharded:
        return _expert_parallel(plan, axes, names, tp, output or names.mlp)
    # Without parts to sum only the batch is sharded, or nothing.
    along = axes.summed or names_of(dp) or plan.axes
    placement = part if axes.summed else Shard(0) if dp else whole
    return plan.local(experts, [placement] * len(along), along)


def _expert_parallel(
    plan: Plan, axes: ExpertAxes, names: ExpertNames, tp: str | None, output: str
) -> Plan:
    """Adds experts sharded by number, and the combination of their outputs."""
    part, shard = Partial(), [Shard(0)] * len(axes.sharded)
    experts, choices = names.experts, f"{names.experts}.<in:{names.index}>"
    plan.shard(rf"{experts}\.\w+", shard, axes.sharded)
    if not axes.dispatched:
        plan.index(choices, shard, axes.sharded, count="num_experts", flag="_is_expert_parallel")
        for axis in (axis for axis in axes.sharded if axis != tp):
            plan.redistribute(f"{output}.<out>", part, Replicate(), axis)
        return plan.local(experts, [part] * len(axes.summed), axes.summed)
    plan.dispatch(choices, shard, axes.sharded, weights=names.weights, count="num_experts")
    if tp in axes.dispatched:
        plan.annotate(rf"{names.mlp}\.{names.router}\..*\.grad", part, tp)
        return plan.local(names.mlp, Shard(1), tp)
    placed = shard + [part] * len(axes.summed)
    return plan.local(experts, placed, [*axes.dispatched, *axes.summed])
