"""Mixtral of transformers (`MixtralForCausalLM`)."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plan_api.plan import Plan
from plan_api.zoo.experts import add_experts
from plan_api.zoo.llama import decoder
from plan_api.zoo.requirements import Axes, check_options, expert_axes, names_of

__all__ = ["mixtral"]


def mixtral(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    ep: Axes = None,
    loss_parallel: bool = False,
) -> Plan:
    """Extends LLaMA's plan to experts, which are sharded by number, or each along ``tp``.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: the axis along which experts are sharded by number, or several; ``tp`` may be among
            them, and otherwise shards each expert. Tokens are dispatched along axes of ``dp``, and
            along ``tp`` under ``sp``. Ranks may have different numbers of experts, but not none.
            None: all ranks have a part of each expert.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`; or tokens are sharded along some axes of ``ep`` only.
        ImportError: ``tp`` shards each expert, without ragged-shard, which shards the fused gate
            and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel)
    axes = expert_axes("mixtral", tp, dp, sp, ep)
    plan = decoder(mesh, tp, dp, sp, loss_parallel, axes.mlp_grad)
    if names_of(dp) and tp not in axes.dispatched:  # else routers run on local tensors
        plan.annotate("<out:router_logits>", [Shard(0)] * len(names_of(dp)), names_of(dp))
    return add_experts(plan, axes, gated="mixtral")
