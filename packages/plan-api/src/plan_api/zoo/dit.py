"""DiT, with the names of its authors' code (https://github.com/facebookresearch/DiT, models.py)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.needs import check_options, fused

__all__ = ["dit"]


def dit(mesh: DeviceMesh, tp: str | None = "tp", dp: str | None = None, sp: bool = False) -> Plan:
    """Tensor parallel blocks and modulations, with sequence and data parallelism if asked.

    Times and classes become DTensors behind what the embedders compute from them by themselves.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads should be a multiple of its size. None: none.
        dp: the axis along which batches are cut, before ``tp`` in the mesh; None: none.
        sp: whether hidden states between attention and MLP are cut along the patches, on ``tp``.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` without ``tp``.
        ImportError: ragged-shard is not installed.
    """
    check_options("dit", tp, sp=sp)
    plan, whole, block = Plan(mesh), Replicate(), r"blocks\.\d+"
    axis = dp or tp or plan.axes[0]
    for name in ("x_embedder", r"t_embedder\.mlp", r"y_embedder\.embedding_table"):
        plan.shard(f"{name}.<in>", whole if dp is None else Shard(0), axis)
    if tp is not None:
        rest = Shard(1) if sp else whole
        plan.shard(rf"{block}\.attn\.qkv\.(weight|bias)", fused(0, 3, "dit"), tp)
        plan.shard(rf"{block}\.mlp\.fc1\.(weight|bias)", Shard(0), tp)
        plan.shard(rf"{block}\.(attn\.proj|mlp\.fc2)\.weight", Shard(1), tp)
        plan.shard(r".*\.adaLN_modulation\.1\.(weight|bias)", Shard(0), tp)
        plan.shard(r".*\.adaLN_modulation.<out>", whole, tp)
        plan.shard(r"x_embedder.<out>", rest, tp)
        plan.redistribute(rf"{block}\.(attn|mlp).<in>", rest, whole, tp, grad_dst=rest)
        plan.shard(rf"{block}\.(attn\.proj|mlp\.fc2).<out>", rest, tp)
        plan.shard("final_layer.<out>", whole, tp)
    return plan
