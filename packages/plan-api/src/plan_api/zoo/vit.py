"""ViT of transformers (`ViTForImageClassification`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.needs import check_options

__all__ = ["vit"]


def vit(mesh: DeviceMesh, tp: str | None = "tp", dp: str | None = None, sp: bool = False) -> Plan:
    """Tensor parallel Linears, with sequence and data parallelism if asked, as `zoo.llama`.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads have to be a multiple of its size, and the hidden
            size of the MLP should be. None: none.
        dp: the axis along which batches are cut; None: none.
        sp: whether hidden states between attention and MLP are cut along the patches, on ``tp``.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` without ``tp``.
    """
    check_options("vit", tp, sp=sp)
    plan, whole, layer = Plan(mesh), Replicate(), r"vit\.layers\.\d+"
    axis = dp or tp or plan.axes[0]
    for name in ("pixel_values", "labels"):
        plan.shard(f"<in:{name}>", whole if dp is None else Shard(0), axis)
    if tp is not None:
        rest = Shard(1) if sp else whole
        plan.shard(rf"{layer}\..*\.(q|k|v)_proj\.(weight|bias)", Shard(0), tp, unit="head_dim")
        plan.shard(rf"{layer}\..*\.fc1\.(weight|bias)", Shard(0), tp)
        plan.shard(rf"{layer}\..*\.(o_proj|fc2)\.weight", Shard(1), tp)
        plan.shard(r"vit\.embeddings.<out>", rest, tp)
        plan.redistribute(rf"{layer}\.(attention|mlp).<in>", rest, whole, tp, grad_dst=rest)
        plan.shard(rf"{layer}\.(attention|mlp).<out>", rest, tp)
        plan.shard(r"vit\.layernorm.<out>", whole, tp)
    return plan.shard("<out:loss>", [whole] * len(plan.axes))
