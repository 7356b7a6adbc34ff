"""GPT-OSS of transformers (`GptOssForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder
from plan_api.zoo.experts import ExpertNames, add_experts, run_routers_on_local_tensors
from plan_api.zoo.llama import GROUPS, decoder
from plan_api.zoo.requirements import (
    Axes,
    ContextParallel,
    check_options,
    expert_axes,
)

__all__ = ["gpt_oss"]


def gpt_oss(
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
    """Extends LLaMA's plan to sinks, biases and experts, which have biases, too.

    Each rank has the sinks of its heads. transformers has no scaled_dot_product_attention with
    sinks: the model needs ``attn_implementation="eager"``, or under ``cp`` `describe_masks`.

    Args:
        mesh: as in `llama`.
        tp: as in `mixtral`.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: as in `mixtral`.
        ep_chunks: as in `mixtral`.
        cp: as in `mixtral`; the model needs `describe_masks`.
        cp_method: as in `llama`.
        cp_order: as in `llama`.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `mixtral`.
    """
    check_options("gpt_oss", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    context = ContextParallel.of(cp, cp_method, cp_order)
    axes = expert_axes("gpt_oss", tp, dp, sp, ep, context)
    names = ExpertNames(router="router", index="router_indices", weights="routing_weights")
    plan = decoder(mesh, tp, dp, sp, loss_parallel, axes.mlp_grad, context)
    if cp is not None:
        run_routers_on_local_tensors(plan, axes, names)
    if tp is not None:
        whole, part, attention = Replicate(), Partial(), r".*\.self_attn"
        plan.shard(rf"{attention}\.q_proj\.bias", Shard(0), tp, unit=GROUPS)
        plan.shard(rf"{attention}\.(k|v)_proj\.bias", Shard(0), tp, unit="head_dim")
        plan.shard(rf"{attention}\.sinks", Shard(0), tp, unit=GROUPS[0])
        plan.redistribute(rf"{attention}\.o_proj\.bias", whole, part, tp)
        if cp is not None:
            plan.local(rf"{attention}\.o_proj", part, tp)  # DTensors would gather sequences
        if tp not in axes.sharded:
            # Columns of gates and of up projections alternate.
            plan.shard(rf"{names.experts}\.gate_up_proj", Shard(2), tp)
            plan.shard(rf"{names.experts}\.(gate_up_proj_bias|down_proj)", Shard(1), tp)
            plan.redistribute(rf"{names.experts}\.down_proj_bias", whole, part, tp)
    return add_experts(plan, axes, names, ep_chunks)
