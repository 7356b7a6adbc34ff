"""DeepSeek-V3 of transformers (`DeepseekV3ForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder
from plan_api.zoo.experts import ExpertNames, add_experts, run_routers_on_local_tensors
from plan_api.zoo.llama import Linears, decoder
from plan_api.zoo.requirements import (
    Axes,
    ContextParallel,
    check_options,
    expert_axes,
    names_of,
)

__all__ = ["deepseek_v3"]

_LINEARS: Linears = {
    "q|q_b|gate|up": (Shard(0), None),
    "o|down": (Shard(1), None),
    "q|q_b": (Shard(0), "qk_head_dim"),
    "o": (Shard(1), "v_head_dim"),
}
_ATTENTION = r"model\.layers\.\d+\.self_attn"


def deepseek_v3(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    ep: Axes = None,
    ep_chunks: int = 1,
    dense: int = 3,
    cp: str | None = None,
    cp_method: ContextMethod = "ring",
    cp_order: SequenceOrder | None = None,
    loss_parallel: bool = False,
) -> Plan:
    """Extends LLaMA's plan to latents of attention, and to experts beside a shared expert.

    Latents are computed on every rank of ``tp``, and heads from them on the heads' ranks, which sum
    the latents' gradients. Routers, whose choice of groups DTensors cannot compute, run on local
    tensors.

    Args:
        mesh: as in `llama`.
        tp: as in `mixtral`.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: as in `mixtral`. Along ``tp`` under ``sp`` each rank has the shared expert, too, and
            runs it on its tokens.
        ep_chunks: as in `mixtral`.
        dense: number of the first layers without experts, ``first_k_dense_replace`` of the config.
        cp: as in `mixtral`.
        cp_method: as in `llama`.
        cp_order: as in `llama`.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `mixtral`.
        ImportError: as `mixtral`.
    """
    check_options("deepseek_v3", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    context = ContextParallel.of(cp, cp_method, cp_order)
    axes = expert_axes("deepseek_v3", tp, dp, sp, ep, context)
    first = "|".join(map(str, range(dense)))
    layers = rf"model\.layers\.(?!({first})\.)\d+" if dense else r"model\.layers\.\d+"
    names = ExpertNames(mlp=rf"{layers}\.mlp", shared="shared_experts")
    plan = decoder(mesh, tp, dp, sp, loss_parallel, None, context, linears=_LINEARS)
    # The model writes keys into a tensor that it creates.
    keys = dict.fromkeys(names_of(dp), Shard(0)) | {cp: Shard(2), tp: Shard(1)}
    placed = {axis: placement for axis, placement in keys.items() if axis is not None}
    if placed:
        plan.factory(_ATTENTION, [*placed.values()], [*placed], sizes="local")
    if tp is not None:
        rest = Shard(1) if sp else Replicate()
        _shard_heads(plan, tp)
        if dense:
            _sum_outputs(plan, rf"model\.layers\.({first})\.mlp", tp, rest, Partial())
        if tp not in axes.dispatched:
            _sum_outputs(plan, names.mlp, tp, rest, Replicate())
        _shard_shared(plan, rf"{names.mlp}\.shared_experts", tp, tp in axes.dispatched)
    run_routers_on_local_tensors(plan, axes, names)
    return add_experts(plan, axes, names, ep_chunks, gated="deepseek_v3", output=names.experts)


def _sum_outputs(plan: Plan, path: str, tp: str, rest: Placement, grad: Placement) -> None:
    """Gathers the inputs of MLPs, and sums their outputs."""
    plan.redistribute(f"{path}.<in>", rest, Replicate(), tp, grad_src=grad, grad_dst=rest)
    plan.redistribute(f"{path}.<out>", Partial(), rest, tp)


def _shard_heads(plan: Plan, tp: str) -> None:
    """Shards heads, which are computed from latents on all ranks."""
    plan.shard(rf"{_ATTENTION}\.kv_b_proj\.weight", Shard(0), tp)
    latent = r"(q_a_proj|q_a_layernorm|kv_a_proj_with_mqa|kv_a_layernorm)"
    plan.annotate(rf"{_ATTENTION}\.{latent}\.weight\.grad", Partial(), tp)


def _shard_shared(plan: Plan, path: str, tp: str, dispatched: bool) -> None:
    """Shards shared experts, or replicates them where each rank runs them on its tokens."""
    if dispatched:
        plan.shard(rf"{path}\..*\.weight", Replicate(), tp)
        plan.annotate(rf"{path}\..*\.weight\.grad", Partial(), tp)
    else:
        whole, part = Replicate(), Partial()
        plan.redistribute(f"{path}.<in>", whole, whole, tp, grad_src=part, grad_dst=whole)
