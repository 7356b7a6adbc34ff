"""The text model of Gemma 3 of transformers (`Gemma3ForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from plan_api.plan import Plan
from plan_api.zoo.llama import decoder, sum_head_norms
from plan_api.zoo.requirements import Axes, check_options

__all__ = ["gemma3"]


def gemma3(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    loss_parallel: bool = False,
) -> Plan:
    """Extends LLaMA's plan to the norms of queries and keys, of which each rank has its heads'.

    The norms after attention and MLP take the sums over ``tp``. Each rank makes the masks of full
    and of sliding attention; context parallelism would need a window across ranks.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`.
        dp: as in `llama`.
        sp: as in `llama`.
        loss_parallel: as in `llama`; the embeddings are sharded, too, where they are tied.

    Raises:
        ValueError: the mesh lacks an axis, or ``sp`` or ``loss_parallel`` without ``tp``.
    """
    check_options("gemma3", tp, sp=sp, loss_parallel=loss_parallel)
    return sum_head_norms(decoder(mesh, tp, dp, sp, loss_parallel, Partial()), tp)
