"""GPT-2 of transformers (`GPT2LMHeadModel`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.spec.placements import interleaved_shard
from plan_api.zoo.requirements import check_options, shard_batch, shard_classes

__all__ = ["gpt2"]


def gpt2(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: str | None = None,
    sp: bool = False,
    *,
    loss_parallel: bool = False,
) -> Plan:
    """Shards as `zoo.llama`, for weights of (in, out) and fused queries, keys and values.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; heads have to be a multiple of its size. None: none.
        dp: the axis along which batches are sharded, before ``tp`` in the mesh; None: none.
        sp: whether hidden states between attention and MLP are sharded on the sequence, on ``tp``.
        loss_parallel: whether logits, and with them the embeddings that their weights are tied to,
            are sharded on the vocabulary, on ``tp``.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` or ``loss_parallel`` without ``tp``.
        ImportError: ragged-shard is not installed.
    """
    check_options("gpt2", tp, sp=sp, loss_parallel=loss_parallel)
    plan, whole, part, layer = Plan(mesh), Replicate(), Partial(), r"transformer\.h\.\d+"
    dropped = rf"{layer}\.(attn\.resid_dropout|mlp\.dropout).<op:dropout>"
    weights = rf"{layer}\.attn.<op:dropout>"
    embedded = r"transformer\.drop.<op:dropout>"
    shard_batch(plan, dp, ("input_ids", "labels"), dropped, weights, embedded)
    for made in (r"transformer\.wpe.<in>", rf"{layer}.<in:attention_mask>"):
        plan.redistribute(made, [whole] * len(plan.axes), [whole] * len(plan.axes))
    if tp is not None:
        rest = Shard(1) if sp else whole
        plan.shard(
            rf"{layer}\.attn\.c_attn\.weight", interleaved_shard(1, 3, "gpt2"), tp, unit="head_dim"
        )
        plan.shard(
            rf"{layer}\.attn\.c_attn\.bias", interleaved_shard(0, 3, "gpt2"), tp, unit="head_dim"
        )
        plan.shard(rf"{layer}\.mlp\.c_fc\.weight", Shard(1), tp)
        plan.shard(rf"{layer}\.mlp\.c_fc\.bias", Shard(0), tp)
        plan.shard(rf"{layer}\.mlp\.c_proj\.weight", Shard(0), tp)
        plan.shard(rf"{layer}\.attn\.c_proj\.weight", Shard(0), tp, unit="head_dim")
        plan.redistribute(rf"{layer}\..*\.c_proj\.bias", whole, part, tp)
        entering = rf"{layer}\.(attn|mlp).<in>"
        plan.redistribute(entering, rest, whole, tp, grad_src=part, grad_dst=rest)
        plan.redistribute(rf"{layer}\.(attn|mlp)\.c_proj.<out>", part, rest, tp)
        fused = interleaved_shard(2, 3, "gpt2")
        plan.annotate(rf"{layer}\.attn\.c_attn.<op:view:1>", fused, tp, unit="head_dim")
        plan.annotate(rf"{layer}\.mlp\.c_fc.<op:view:1>", Shard(2), tp)
        plan.annotate(rf"{layer}\.attn.<op:split>", fused, tp, unit="head_dim")
        plan.annotate(weights, Shard(1), tp)
        if sp:
            end = r"transformer\.ln_f.<out>"
            plan.redistribute(r"transformer\.h\.0.<in>", whole, rest, tp)
            plan.redistribute(end, rest, whole, tp, grad_src=whole, grad_dst=rest)
            plan.annotate(r"transformer\..*ln_.*\.grad", part, tp)
            plan.annotate(dropped, rest, tp)
        if loss_parallel:
            plan.shard(r"lm_head\.weight", Shard(0), tp)
            plan.shard(r"transformer\.wte.<out>", whole, tp)  # a sum, for it is tied
            plan.redistribute("lm_head.<in>", whole, whole, tp, grad_src=part, grad_dst=whole)
            shard_classes(plan, tp)
    return plan
