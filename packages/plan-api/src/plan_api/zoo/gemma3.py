"""The text model of Gemma 3 of transformers (`Gemma3ForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from plan_api.plan import Plan
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder
from plan_api.zoo.llama import decoder, sum_head_norms
from plan_api.zoo.requirements import Axes, ContextParallel, check_options

__all__ = ["gemma3"]


def gemma3(
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

    The norms after attention and MLP take the sums over ``tp``. Each rank makes the masks of full
    and of sliding attention, but under ``cp``.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`.
        dp: as in `llama`.
        sp: as in `llama`.
        cp: as in `llama`; instead of an attention implementation the model needs
            `describe_masks`, as no rank has masks of sliding windows. A window that is shorter than
            a rank's part of a sequence is sent to neighbours only.
        cp_method: as in `llama`.
        cp_order: as in `llama`.
        loss_parallel: as in `llama`; the embeddings are sharded, too, where they are tied.

    Raises:
        ValueError: as `llama`.
    """
    check_options("gemma3", tp, sp=sp, loss_parallel=loss_parallel, dp=dp, cp=cp, mesh=mesh)
    context = ContextParallel.of(cp, cp_method, cp_order)
    return sum_head_norms(decoder(mesh, tp, dp, sp, loss_parallel, Partial(), context), tp)
