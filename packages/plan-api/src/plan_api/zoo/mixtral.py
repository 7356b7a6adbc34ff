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
    loss_parallel: bool = False,
) -> Plan:
    """LLaMA's plan, and experts cut within: every rank has a part of each.

    transformers' experts loop over those that are hit, whose number depends on the data, so they
    run on local tensors (`Plan.local`).

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`.
        ImportError: ``tp`` without ragged-shard, which cuts the fused gate and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel)
    whole, part, experts = Replicate(), Partial(), r".*\.mlp\.experts"
    plan = decoder(mesh, tp, dp, sp, loss_parallel, whole)
    if tp is None:
        return plan.local(experts, (), ())
    # The router goes on alike on all ranks, so gradients are summed where experts begin.
    for given in (0, "top_k_weights"):
        plan.redistribute(
            f"{experts}.<in:{given}>", whole, whole, tp, grad_src=part, grad_dst=whole
        )
    plan.shard(rf"{experts}\.gate_up_proj", fused(1, 2, "mixtral"), tp)
    plan.shard(rf"{experts}\.down_proj", Shard(2), tp)
    return plan.local(experts, part, tp)
