"""Mixtral of transformers (`MixtralForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.llama import decoder
from plan_api.zoo.needs import check_options, fused

__all__ = ["mixtral"]


def mixtral(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: str | None = None,
    sp: bool = False,
    *,
    ep: str | None = None,
    loss_parallel: bool = False,
) -> Plan:
    """LLaMA's plan, and experts that are divided among ranks, or cut within.

    transformers' experts loop over those that are hit, whose number depends on the data, so they
    run on local tensors (`Plan.local`), on all tokens of their rank of ``dp``.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: the axis along which experts are divided, each whole on one of its ranks where this is
            ``tp`` itself; beside another ``tp`` they are cut within along that. There may be more
            on some ranks than on others, but not none. None: all ranks have a part of each.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`; or ``ep`` is ``dp``.
        ImportError: a ``tp`` that cuts experts within, without ragged-shard, which cuts the fused
            gate and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, ep=ep)
    whole, part, experts = Replicate(), Partial(), r".*\.mlp\.experts"
    plan = decoder(mesh, tp, dp, sp, loss_parallel, whole)
    axes = [axis for axis in dict.fromkeys((ep, tp)) if axis is not None]
    # The router goes on alike on all ranks, so gradients are summed where experts begin.
    for axis in axes:
        for given in (0, "top_k_weights"):
            begin = f"{experts}.<in:{given}>"
            plan.redistribute(begin, whole, whole, axis, grad_src=part, grad_dst=whole)
    if tp not in (None, ep):
        plan.shard(rf"{experts}\.gate_up_proj", fused(1, 2, "mixtral"), tp)
        plan.shard(rf"{experts}\.down_proj", Shard(2), tp)
    if ep is not None:
        plan.shard(rf"{experts}\.(gate_up|down)_proj", Shard(0), ep)
        attributes = {"count": "num_experts", "flag": "_is_expert_parallel"}
        plan.index(rf"{experts}.<in:top_k_index>", Shard(0), ep, **attributes)
        if ep != tp:
            plan.redistribute(r".*\.mlp.<out>", part, whole, ep)
    if not axes and dp is not None:  # nothing is cut but the batch; they are local all the same
        return plan.local(experts, Shard(0), dp)
    return plan.local(experts, [part] * len(axes), axes)
