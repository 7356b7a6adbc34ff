"""GPT-2 of transformers (`GPT2LMHeadModel`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.needs import check_options, fused

__all__ = ["gpt2"]


def gpt2(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: str | None = None,
    sp: bool = False,
    *,
    loss_parallel: bool = False,
) -> Plan:
    """As `zoo.llama`; weights are (in, out), and one matrix makes queries, keys and values.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads have to be a multiple of its size. None: none.
        dp: the axis along which batches are cut, before ``tp`` in the mesh; None: none.
        sp: whether hidden states between attention and MLP are cut along the sequence, on ``tp``.
        loss_parallel: whether logits, and with them the embeddings that their weights are tied to,
            are cut along the vocabulary, on ``tp``.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` or ``loss_parallel`` without ``tp``.
        ImportError: ragged-shard is not installed.
    """
    check_options("gpt2", tp, sp=sp, loss_parallel=loss_parallel)
    plan, whole, layer = Plan(mesh), Replicate(), r"transformer\.h\.\d+"
    batch = [whole] * len(plan.axes) if dp is None else Shard(0)
    for name in ("input_ids", "position_ids", "labels"):
        plan.shard(f"<in:{name}>", batch, dp)
    plan.shard(r"transformer\.wpe.<in>", [whole] * len(plan.axes))
    plan.shard(rf"{layer}.<in:attention_mask>", [whole] * len(plan.axes))
    if tp is not None:
        rest = Shard(1) if sp else whole
        plan.shard(rf"{layer}\.attn\.c_attn\.weight", fused(1, 3, "gpt2"), tp, unit="head_dim")
        plan.shard(rf"{layer}\.attn\.c_attn\.bias", fused(0, 3, "gpt2"), tp, unit="head_dim")
        plan.shard(rf"{layer}\.mlp\.c_fc\.weight", Shard(1), tp)
        plan.shard(rf"{layer}\.mlp\.c_fc\.bias", Shard(0), tp)
        plan.shard(rf"{layer}\..*\.c_proj\.weight", Shard(0), tp)
        plan.shard(r"transformer\.(wte|wpe).<out>", rest, tp)
        plan.redistribute(rf"{layer}\.(attn|mlp).<in>", rest, whole, tp, grad_dst=rest)
        plan.shard(rf"{layer}\.(attn|mlp)\.c_proj.<out>", rest, tp)
        plan.redistribute("lm_head.<in>", rest, whole, tp, grad_dst=rest)
        if loss_parallel:
            plan.shard(r"lm_head\.weight", Shard(0), tp)
    return plan.shard("<out:loss>", [whole] * len(plan.axes))
