"""Qwen3 of transformers (`Qwen3ForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder
from plan_api.zoo.llama import decoder, sum_head_norms
from plan_api.zoo.requirements import Axes, ContextParallel, check_options

__all__ = ["qwen3"]


def qwen3(
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
    """Extends LLaMA's plan to the norms of queries and keys, of which each rank has its heads'.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`.
        dp: as in `llama`.
        sp: as in `llama`.
        cp: as in `llama`, without layers of sliding attention.
        cp_method: as in `llama`.
        cp_order: as in `llama`.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`.
    """
    check_options("qwen3", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    context = ContextParallel.of(cp, cp_method, cp_order)
    return sum_head_norms(decoder(mesh, tp, dp, sp, loss_parallel, Partial(), context), tp)
