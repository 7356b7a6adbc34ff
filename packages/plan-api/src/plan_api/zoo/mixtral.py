"""Mixtral of transformers (`MixtralForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder
from plan_api.zoo.experts import add_experts, run_routers_on_local_tensors
from plan_api.zoo.llama import decoder
from plan_api.zoo.requirements import (
    Axes,
    ContextParallel,
    check_options,
    expert_axes,
    names_of,
)

__all__ = ["mixtral"]


def mixtral(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    ep: Axes = None,
    ep_chunks: int = 1,
    cp: str | None = None,
    cp_method: ContextMethod = "ring",
    cp_order: SequenceOrder | None = None,
    loss_parallel: bool = False,
) -> Plan:
    """Extends LLaMA's plan to experts, which are sharded by number, or each along ``tp``.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: the axis along which experts are sharded by number, or several; ``tp`` may be among
            them, and otherwise shards each expert. Tokens are dispatched along axes of ``dp``,
            along ``cp``, and along ``tp`` under ``sp``. Ranks may have different numbers of
            experts, but not none. None: all ranks have a part of each expert.
        ep_chunks: parts in which a rank dispatches its tokens, see `Plan.dispatch`.
        cp: as in `llama`; it may be among the axes of ``ep``, too.
        cp_method: as in `llama`.
        cp_order: as in `llama`.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`; or tokens are sharded along some axes of ``ep`` only, or along
            none, with several ``ep_chunks``.
        ImportError: ``tp`` shards each expert, without ragged-shard, which shards the fused gate
            and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    axes = expert_axes("mixtral", tp, dp, sp, ep, ContextParallel.of(cp, cp_method, cp_order))
    plan = decoder(mesh, tp, dp, sp, loss_parallel, axes.mlp_grad, axes.context)
    if cp is not None:
        run_routers_on_local_tensors(plan, axes)
    elif names_of(dp) and tp not in axes.dispatched:  # else routers run on local tensors
        plan.annotate("<out:router_logits>", [Shard(0)] * len(names_of(dp)), names_of(dp))
    return add_experts(plan, axes, chunks=ep_chunks, gated="mixtral")
