"""LLaMA of transformers (`LlamaForCausalLM`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder, Unit
from plan_api.zoo.requirements import (
    Axes,
    ContextParallel,
    check_options,
    shard_batch,
    shard_classes,
    shard_sequence,
)

__all__ = ["GROUPS", "LINEARS", "Linears", "decoder", "llama", "sum_head_norms"]

#: By the names of projections: the placement of their weights, and the unit of a sharded dim.
Linears: TypeAlias = Mapping[str, tuple[Shard, Unit | None]]
#: The unit of queries, which are sharded with the keys and values of their group.
GROUPS = ("num_key_value_groups", "head_dim")
LINEARS: Linears = MappingProxyType(
    {
        "q|k|v|gate|up": (Shard(0), None),
        "o|down": (Shard(1), None),
        "q": (Shard(0), GROUPS),
        "k|v": (Shard(0), "head_dim"),
        "o": (Shard(1), GROUPS),
    }
)


def llama(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    cp: str | None = None,
    cp_method: ContextMethod = "ring",
    cp_order: SequenceOrder | None = None,
    loss_parallel: bool = False,
) -> Plan:
    """Shards Linears as Megatron-LM, with optional sequence, data and context parallelism.

    Args:
        mesh: with the axes that are named.
        tp: the axis of tensor parallelism; None: none. In Eager its size has to divide the numbers
            of heads and key-value heads, or `parallelize` refuses; in static mode ranks may have
            different numbers of them. It should divide the hidden size of the MLP.
        dp: the axis along which batches are sharded, or several; None: none.
        sp: whether hidden states between attention and MLP are sharded on the sequence, on ``tp``.
        cp: the axis along which sequences are sharded, everywhere (`Plan.sequence`), before ``tp``
            in the mesh if ``sp`` shards them further; None: none. The model needs
            ``attn_implementation="sdpa"``; logits are in the order of the ranks.
        cp_method: of attention over them, as in `Plan.context`.
        cp_order: as in `Plan.context`.
        loss_parallel: whether logits are sharded on the vocabulary, on ``tp``, up to the loss.

    Raises:
        ValueError: the mesh lacks an axis, ``sp`` or ``loss_parallel`` is given without ``tp``, or
            ``cp`` is an axis of another option, or after a ``tp`` that shards sequences.
    """
    check_options("llama", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    context = ContextParallel.of(cp, cp_method, cp_order)
    return decoder(mesh, tp, dp, sp, loss_parallel, Partial(), context)


def decoder(
    mesh: DeviceMesh,
    tp: str | None,
    dp: Axes,
    sp: bool,
    loss_parallel: bool,
    mlp_grad: Placement | None,
    context: ContextParallel | None = None,
    *,
    linears: Linears = LINEARS,
) -> Plan:
    """Makes the plan that `llama` and similar decoders have in common.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`.
        dp: as in `llama`.
        sp: as in `llama`.
        loss_parallel: as in `llama`.
        mlp_grad: the placement of the gradient of the MLPs' inputs, along ``tp``; None: MLPs take
            hidden states in the placement between them and attention.
        context: how sequences are sharded; None: they are not.
        linears: how Linears of layers are sharded, as `LINEARS`.
    """
    plan, whole, part, layer = Plan(mesh), Replicate(), Partial(), r"model\.layers\.\d+"
    shard_batch(plan, dp, ("input_ids", "labels"), rf"{layer}\.self_attn.<op:dropout>", cp=context)
    made = [r"model\.rotary_emb.<in:position_ids>", rf"{layer}.<in:attention_mask>"]
    if context is not None:
        shard_sequence(plan, context, dp, made.pop(0), rf"{layer}\.self_attn")
    for one in made:
        plan.redistribute(one, [whole] * len(plan.axes), [whole] * len(plan.axes))
    if tp is not None:
        rest = Shard(1) if sp else whole
        for names, (placement, unit) in linears.items():
            plan.shard(rf"{layer}\..*\.({names})_proj\.weight", placement, tp, unit=unit)
        # Also where forward communicates nothing gradients are Partial: by itself torch shards them
        # on the batch, after which the products of attention are redistributed.
        moved = {"self_attn": part} | ({} if mlp_grad is None else {"mlp": mlp_grad})
        for at, grad in moved.items():
            plan.redistribute(rf"{layer}\.{at}.<in>", rest, whole, tp, grad_src=grad, grad_dst=rest)
        plan.redistribute(rf"{layer}\.({'|'.join(moved)}).<out>", part, rest, tp)
        plan.annotate(rf"{layer}\.self_attn.<op:dropout>", Shard(1), tp, unit=GROUPS[0])
        if sp:
            plan.redistribute(r"model\.layers\.0.<in>", whole, rest, tp)
            plan.annotate(r".*norm\.weight\.grad", part, tp)
        logits = part if loss_parallel else whole
        plan.redistribute("lm_head.<in>", rest, whole, tp, grad_src=logits, grad_dst=rest)
        if loss_parallel:
            plan.shard(r"lm_head\.weight", Shard(0), tp)
            plan.shard(r"model\.embed_tokens.<out>", whole, tp)  # Partial if it is tied
            shard_classes(plan, tp)
    return plan


def sum_head_norms(plan: Plan, tp: str | None) -> Plan:
    """Annotates the norms of queries and keys, which each rank of ``tp`` applies to its heads.

    Args:
        plan: of `decoder`, to which the entry is added.
        tp: as in `llama`.

    Returns:
        the plan.
    """
    if tp is not None:
        plan.annotate(r".*\.self_attn\.(q|k)_norm\.weight\.grad", Partial(), tp)
    return plan
