"""LLaMA of transformers (`LlamaForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.needs import check_options

__all__ = ["llama"]


def llama(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: str | None = None,
    sp: bool = False,
    *,
    loss_parallel: bool = False,
) -> Plan:
    """Tensor parallel Linears, with sequence and data parallelism if asked (Megatron-LM's way).

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads, key-value heads and the hidden size of the MLP
            should be multiples of its size. None: none.
        dp: the axis along which batches are cut; None: none.
        sp: whether hidden states between attention and MLP are cut along the sequence, on ``tp``.
        loss_parallel: whether logits are cut along the vocabulary, on ``tp``, up to the loss.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` or ``loss_parallel`` without ``tp``.
    """
    check_options("llama", tp, sp=sp, loss_parallel=loss_parallel)
    plan, whole, layer = Plan(mesh), Replicate(), r"model\.layers\.\d+"
    batch = [whole] * len(plan.axes) if dp is None else Shard(0)
    for name in ("input_ids", "position_ids", "labels"):
        plan.shard(f"<in:{name}>", batch, dp)
    plan.shard(r"model\.rotary_emb.<in:position_ids>", [whole] * len(plan.axes))
    plan.shard(rf"{layer}.<in:attention_mask>", [whole] * len(plan.axes))
    if tp is not None:
        rest = Shard(1) if sp else whole
        plan.shard(rf"{layer}\..*\.(q|k|v|gate|up)_proj\.weight", Shard(0), tp)
        plan.shard(rf"{layer}\..*\.(o|down)_proj\.weight", Shard(1), tp)
        plan.shard(r"model\.embed_tokens.<out>", rest, tp)
        # Where nothing moves forward, gradients come back as sums all the same: left alone, torch
        # cuts them along the batch, after which attention's products move everything.
        plan.redistribute(rf"{layer}\.(self_attn|mlp).<in>", rest, whole, tp, grad_dst=rest)
        plan.shard(rf"{layer}\.(self_attn|mlp).<out>", rest, tp)
        plan.redistribute("lm_head.<in>", rest, whole, tp, grad_dst=rest)
        if loss_parallel:
            plan.shard(r"lm_head\.weight", Shard(0), tp)
    return plan.shard("<out:loss>", [whole] * len(plan.axes))
