"""Qwen3's mixture of experts of transformers (`Qwen3MoeForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder
from plan_api.zoo.experts import add_experts, run_routers_on_local_tensors
from plan_api.zoo.llama import decoder, sum_head_norms
from plan_api.zoo.requirements import Axes, ContextParallel, check_options, expert_axes

__all__ = ["qwen3_moe"]


def qwen3_moe(
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
    """Extends Qwen3's plan to experts, as `mixtral`. All layers have experts.

    Args:
        mesh: as in `llama`.
        tp: as in `mixtral`.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: as in `mixtral`.
        ep_chunks: as in `mixtral`.
        cp: as in `llama`; it may be among the axes of ``ep``, too.
        cp_method: as in `llama`.
        cp_order: as in `llama`.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `mixtral`.
        ImportError: as `mixtral`.
    """
    check_options("qwen3_moe", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    context = ContextParallel.of(cp, cp_method, cp_order)
    axes = expert_axes("qwen3_moe", tp, dp, sp, ep, context)
    plan = sum_head_norms(decoder(mesh, tp, dp, sp, loss_parallel, axes.mlp_grad, context), tp)
    if cp is not None:
        run_routers_on_local_tensors(plan, axes)
    return add_experts(plan, axes, chunks=ep_chunks, gated="qwen3_moe")
