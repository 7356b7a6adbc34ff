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
from plan_api.zoo.requirements import ExpertAxes, check_ep_chunks

__all__ = ["ExpertNames", "add_experts", "run_routers_on_local_tensors"]

_R, _P = Replicate(), Partial()


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture of experts in a model of transformers.

    Attributes:
        mlp: pattern of the MLPs that consist of a router and ``experts``.
        router: name of the router in such an MLP.
        index: argument of the experts that has the choices of tokens.
        weights: argument of the experts that has the weights of choices.
        shared: name of the experts in such an MLP that take all tokens; None: there are none.
    """

    mlp: str = r".*\.mlp"
    router: str = "gate"
    index: str = "top_k_index"
    weights: str = "top_k_weights"
    shared: str | None = None

    @property
    def experts(self) -> str:
        """Pattern of the experts."""
        return rf"{self.mlp}\.experts"


_NAMES = ExpertNames()


def add_experts(
    plan: Plan,
    axes: ExpertAxes,
    names: ExpertNames = _NAMES,
    chunks: int = 1,
    *,
    gated: str | None = None,
    output: str | None = None,
) -> Plan:
    """Runs experts on local tensors, sharded by number along ``axes.sharded``.

    Args:
        plan: to which entries are added.
        axes: of the mixture.
        names: of the mixture.
        chunks: parts in which tokens are dispatched.
        gated: name of the plan, for messages, if experts have a fused gate and up projection and a
            down projection of (experts, out, in), which ``axes.tp`` shards where it does not shard
            experts by number; None: the plan has the entries for its own projections.
        output: pattern of the modules whose outputs are summed along axes of experts that shard
            nothing else; None: the MLPs.

    Returns:
        the plan.

    Raises:
        ValueError: there are several chunks, and tokens are not dispatched.
        ImportError: ragged-shard is not installed, which shards fused projections.
    """
    check_ep_chunks(axes, chunks)
    if gated is not None and axes.tp is not None and axes.tp not in axes.sharded:
        plan.shard(rf"{names.experts}\.gate_up_proj", interleaved_shard(1, 2, gated), axes.tp)
        plan.shard(rf"{names.experts}\.down_proj", Shard(2), axes.tp)
    # The router is replicated, so gradients are summed at the inputs of the experts.
    for axis, at in itertools.product(axes.summed, (0, names.weights)):
        plan.redistribute(f"{names.experts}.<in:{at}>", _R, _R, axis, grad_src=_P, grad_dst=_R)
    plan.annotate(rf"{names.experts}\..*\.grad", [_P] * len(axes.replicated), axes.replicated)
    if axes.sharded:
        return _expert_parallel(plan, axes, names, output or names.mlp, chunks)
    # Without parts to sum only the batch is sharded, or nothing.
    return plan.local(names.experts, [*axes.outputs.values()] or _R, [*axes.outputs] or None)


def run_routers_on_local_tensors(plan: Plan, axes: ExpertAxes, names: ExpertNames = _NAMES) -> Plan:
    """Runs routers on this rank's tokens, where DTensors would gather them, or cannot choose.

    Where ``axes.tp`` dispatches tokens, all of the MLP runs on local tensors, with its router.

    Args:
        plan: to which the entry is added.
        axes: of the mixture.
        names: of the mixture.

    Returns:
        the plan.
    """
    if axes.tp in axes.dispatched:
        return plan
    along = axes.tokens or plan.axes
    placement = Shard(0) if axes.tokens else _R
    return plan.local(rf"{names.mlp}\.{names.router}", [placement] * len(along), along)


def _expert_parallel(
    plan: Plan, axes: ExpertAxes, names: ExpertNames, output: str, chunks: int
) -> Plan:
    """Adds experts sharded by number, and the combination of their outputs."""
    shard, tp = [Shard(0)] * len(axes.sharded), axes.tp
    experts, choices = names.experts, f"{names.experts}.<in:{names.index}>"
    plan.shard(rf"{experts}\.\w+", shard, axes.sharded)
    if not axes.dispatched:
        plan.index(choices, shard, axes.sharded, count="num_experts", flag="_is_expert_parallel")
        for axis in (axis for axis in axes.sharded if axis != tp):
            plan.redistribute(f"{output}.<out>", _P, _R, axis)
        return plan.local(experts, [_P] * len(axes.summed), axes.summed)
    plan.dispatch(
        choices, shard, axes.sharded, weights=names.weights, count="num_experts", chunks=chunks,
        overlap=names.shared,
    )  # fmt: skip
    if tp in axes.dispatched:
        plan.annotate(rf"{names.mlp}\.{names.router}\..*\.grad", _P, tp)
        return plan.local(names.mlp, Shard(1), tp)
    placed = shard + [_P] * len(axes.summed)
    return plan.local(experts, placed, [*axes.dispatched, *axes.summed])
