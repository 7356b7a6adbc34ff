"""DiT, with the names of its authors' code (https://github.com/facebookresearch/DiT, models.py)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.spec.placements import interleaved_shard
from plan_api.spec.plan_entries import ContextMethod
from plan_api.zoo.requirements import check_no_sp_beside_cp, check_options

__all__ = ["dit"]


def dit(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: str | None = None,
    sp: bool = False,
    *,
    cp: str | None = None,
    cp_method: ContextMethod = "ring",
) -> Plan:
    """Shards blocks and modulations (TP), with optional sequence, data and context parallelism.

    Times and classes become DTensors after what the embedders compute on plain tensors.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads have to be a multiple of its size. None: none.
        dp: the axis along which batches are sharded, before ``tp`` in the mesh; None: none.
        sp: whether hidden states between attention and MLP are sharded on the patches, on ``tp``.
        cp: the axis along which patches are sharded in blocks, without ``sp``; its size has to
            divide their number. None: none.
        cp_method: of attention over them, as in `Plan.context`; every patch attends to all, so that
            work is balanced in their own order.

    Raises:
        ValueError: the mesh lacks an axis, ``sp`` without ``tp`` or with ``cp``, or ``cp`` is
            an axis of another option.
        ImportError: ragged-shard is not installed.
    """
    check_options("dit", tp, sp=sp, dp=dp, cp=cp, mesh=mesh)
    check_no_sp_beside_cp("dit", cp, sp=sp)
    plan, whole, part, block = Plan(mesh), Replicate(), Partial(), r"blocks\.\d+"
    axis = dp or tp or cp or plan.axes[0]
    drop = rf"{block}\.(attn\.proj_drop|mlp\.drop2).<op:dropout>"
    for name in ("x_embedder", r"t_embedder\.mlp", r"y_embedder\.embedding_table"):
        plan.redistribute(f"{name}.<in>", whole, whole if dp is None else Shard(0), axis)
    if dp is not None:
        plan.annotate(r".*\.grad", part, dp)
        plan.annotate(drop, Shard(0), dp)
        plan.annotate(rf"{block}\.mlp\.drop1.<op:dropout>", Shard(0), dp)
    if cp is not None:
        _shard_patches(plan, block, cp, cp_method)
        plan.annotate(drop, Shard(1), cp)
        plan.annotate(rf"{block}\.mlp\.drop1.<op:dropout>", Shard(1), cp)
    if tp is not None:
        rest, of_tokens = (Shard(1), part) if sp else (whole, whole)
        qkv = rf"{block}\.attn\.qkv\.(weight|bias)"
        plan.shard(qkv, interleaved_shard(0, 3, "dit"), tp, unit="head_dim")
        plan.shard(rf"{block}\.mlp\.fc1\.(weight|bias)", Shard(0), tp)
        plan.shard(rf"{block}\.mlp\.fc2\.weight", Shard(1), tp)
        plan.shard(rf"{block}\.attn\.proj\.weight", Shard(1), tp, unit="head_dim")
        plan.shard(r".*\.adaLN_modulation\.1\.(weight|bias)", Shard(0), tp)
        plan.redistribute(rf"{block}\.(attn\.proj|mlp\.fc2)\.bias", whole, part, tp)
        condition, entering = r".*\.adaLN_modulation", rf"{block}\.(attn|mlp).<in>"
        plan.redistribute(f"{condition}\\.1.<in>", whole, whole, tp, grad_src=part, grad_dst=whole)
        plan.redistribute(
            f"{condition}.<out>", Shard(1), whole, tp, grad_src=of_tokens, grad_dst=Shard(1)
        )
        plan.redistribute(entering, rest, whole, tp, grad_src=part, grad_dst=rest)
        plan.redistribute(rf"{block}\.(attn\.proj|mlp\.fc2).<out>", part, rest, tp)
        plan.annotate(rf"{block}\.attn.<op:reshape:0>", Shard(3), tp)
        plan.annotate(rf"{block}\.attn.<op:reshape:1>", Shard(2), tp, unit="head_dim")
        plan.annotate(rf"{block}\.mlp\.drop1.<op:dropout>", Shard(2), tp)
        if cp is not None:  # DTensors would gather patches
            plan.local(rf"{block}\.(attn\.proj|mlp\.fc2)", part, tp)
        if sp:
            plan.redistribute(r"blocks\.0.<in>", whole, rest, tp)
            plan.redistribute("final_layer.<out>", rest, whole, tp, grad_src=whole, grad_dst=rest)
            plan.annotate(r"final_layer\.linear\.(weight|bias)\.grad", part, tp)
            plan.annotate(drop, Shard(1), tp)
    return plan


def _shard_patches(plan: Plan, block: str, cp: str, method: ContextMethod) -> None:
    """Shards patches between their embedding and what the model makes of the final layer."""
    whole, part, one = Replicate(), Partial(), Shard(1)
    plan.redistribute(r"blocks\.0.<in:0>", whole, one, cp)
    plan.context(rf"{block}\.attn", cp, method=method, order="contiguous")
    plan.redistribute("final_layer.<out>", one, whole, cp, grad_src=whole, grad_dst=one)
    plan.annotate(r"(blocks|final_layer)\..*\.grad", part, cp)
    # Each rank has the terms of its patches of what the condition contributes.
    condition = r".*\.adaLN_modulation\.1.<in>"
    plan.redistribute(condition, whole, whole, cp, grad_src=part, grad_dst=whole)
