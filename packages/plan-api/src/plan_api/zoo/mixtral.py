"""Mixtral of transformers (`MixtralForCausalLM`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.plan import Plan
from plan_api.zoo.llama import decoder
from plan_api.zoo.needs import Axes, check_options, fused, names_of

__all__ = ["mixtral"]

_MLP, _EXPERTS = r".*\.mlp", r".*\.mlp\.experts"


def mixtral(
    mesh: DeviceMesh,
    tp: str | None = "tp",
    dp: Axes = None,
    sp: bool = False,
    *,
    ep: Axes = None,
    loss_parallel: bool = False,
) -> Plan:
    """LLaMA's plan, and experts that are divided among ranks, or cut within.

    transformers' experts loop over those that are hit, whose number depends on the data, so they
    run on local tensors (`Plan.local`). Along an axis of ``ep`` that cuts tokens, each rank has its
    own, and sends them to the experts that they have chosen (`Plan.dispatch`); along another one
    all ranks have the same tokens, and each computes what its experts make of them.

    Args:
        mesh: as in `llama`.
        tp: as in `llama`; the hidden size of the experts should be a multiple of its size, too.
        dp: as in `llama`.
        sp: as in `llama`.
        ep: the axis along which experts are divided, or several, each expert whole on one of its
            ranks where ``tp`` is among them; beside another ``tp`` they are cut within along that.
            Tokens are sent along axes of ``dp``, and along ``tp`` under ``sp``. There may be more
            experts on some ranks than on others, but not none. None: all ranks have a part of each.
        loss_parallel: as in `llama`.

    Raises:
        ValueError: as `llama`; or tokens are cut along some axes of ``ep`` and not along others.
        ImportError: a ``tp`` that cuts experts within, without ragged-shard, which cuts the fused
            gate and up projections.
    """
    check_options("mixtral", tp, sp=sp, loss_parallel=loss_parallel)
    whole, part, along = Replicate(), Partial(), names_of(ep)
    sent = _sent(along, {*names_of(dp), *([tp] if sp else [])})
    on_parts = tp in sent  # the whole MLP, router included, on this rank's tokens
    apart = rf"(?!{_EXPERTS}\.).*\.grad" if sent else r".*\.grad"
    plan = decoder(mesh, tp, dp, sp, loss_parallel, None if on_parts else whole, apart)
    axes = [axis for axis in dict.fromkeys((*along, tp)) if axis is not None and axis not in sent]
    # The router goes on alike on all ranks, so gradients are summed where experts begin.
    for axis in axes:
        for given in (0, "top_k_weights"):
            begin = f"{_EXPERTS}.<in:{given}>"
            plan.redistribute(begin, whole, whole, axis, grad_src=part, grad_dst=whole)
    if tp is not None and tp not in along:
        plan.shard(rf"{_EXPERTS}\.gate_up_proj", fused(1, 2, "mixtral"), tp)
        plan.shard(rf"{_EXPERTS}\.down_proj", Shard(2), tp)
    if along:
        _divide(plan, along, tp, sent)
    if sent:
        left = [axis for axis in names_of(dp) if axis not in sent]
        plan.annotate(rf"{_EXPERTS}\..*\.grad", [part] * len(left), left)
    if on_parts:
        plan.annotate(rf"{_MLP}\.gate\.weight\.grad", part, tp)
        return plan.local(_MLP, Shard(1), tp)
    return plan.local(_EXPERTS, [Shard(0)] * len(sent) + [part] * len(axes), [*sent, *axes])


def _sent(along: tuple[str, ...], cut: set[str | None]) -> tuple[str, ...]:
    """The axes along which tokens are sent to experts: those that cut tokens."""
    sent = tuple(axis for axis in along if axis in cut)
    if sent and sent != along:
        others = ", ".join(repr(axis) for axis in along if axis not in sent)
        raise ValueError(
            f"zoo.mixtral: ep={along} are axes of which {', '.join(map(repr, sent))} cut tokens "
            f"and {others} do not; cut them there too, by dp or by sp=True for tp, or divide "
            f"experts along others"
        )
    return sent


def _divide(plan: Plan, along: Sequence[str], tp: str | None, sent: Sequence[str]) -> None:
    """Experts are divided along axes, and told so; what they make is put together."""
    divided = [Shard(0)] * len(along)
    plan.shard(rf"{_EXPERTS}\.(gate_up|down)_proj", divided, along)
    choices = f"{_EXPERTS}.<in:top_k_index>"
    if sent:
        plan.dispatch(choices, divided, along, weights="top_k_weights", count="num_experts")
        return
    plan.index(choices, divided, along, count="num_experts", flag="_is_expert_parallel")
    for axis in along:
        if axis != tp:
            plan.redistribute(f"{_MLP}.<out>", Partial(), Replicate(), axis)
