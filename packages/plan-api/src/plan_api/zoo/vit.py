"""ViT of transformers (`ViTForImageClassification`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.requirements import check_options, shard_batch

__all__ = ["vit"]


def vit(mesh: DeviceMesh, tp: str | None = "tp", dp: str | None = None, sp: bool = False) -> Plan:
    """Shards Linears as `zoo.llama`, with optional sequence and data parallelism.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads have to be a multiple of its size, and the hidden
            size of the MLP should be. None: none.
        dp: the axis along which batches are sharded; None: none.
        sp: whether hidden states between attention and MLP are sharded on the patches, on ``tp``.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` without ``tp``.
    """
    check_options("vit", tp, sp=sp)
    plan, whole, part, layer = Plan(mesh), Replicate(), Partial(), r"vit\.layers\.\d+"
    drop = rf"{layer}\.dropout.<op:dropout>"
    weights = rf"{layer}\.attention.<op:dropout>"
    embedded = r"vit\.embeddings\.dropout.<op:dropout>"
    shard_batch(plan, dp, ("pixel_values", "labels"), weights, drop, embedded)
    if tp is not None:
        rest = Shard(1) if sp else whole
        plan.shard(rf"{layer}\..*\.(q|k|v)_proj\.(weight|bias)", Shard(0), tp, unit="head_dim")
        plan.shard(rf"{layer}\..*\.fc1\.(weight|bias)", Shard(0), tp)
        plan.shard(rf"{layer}\..*\.fc2\.weight", Shard(1), tp)
        plan.shard(rf"{layer}\..*\.o_proj\.weight", Shard(1), tp, unit="head_dim")
        plan.redistribute(rf"{layer}\..*\.(o_proj|fc2)\.bias", whole, part, tp)
        entering = rf"{layer}\.(attention|mlp).<in>"
        plan.redistribute(entering, rest, whole, tp, grad_src=part, grad_dst=rest)
        plan.redistribute(rf"{layer}\.(attention|mlp).<out>", part, rest, tp)
        plan.annotate(weights, Shard(1), tp)
        if sp:
            plan.redistribute(r"vit\.layers\.0.<in>", whole, rest, tp)
            plan.redistribute(
                r"vit\.layernorm.<out>", rest, whole, tp, grad_src=whole, grad_dst=rest
            )
            plan.annotate(r"vit\.(layers\.\d+\.)?layernorm.*\.grad", part, tp)
            plan.annotate(drop, rest, tp)
    return plan
