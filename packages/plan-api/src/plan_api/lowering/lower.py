"""Lowers a plan for one model, without changing the model."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType

from torch import nn

from plan_api.lowering.expert_indices import expert_indices
from plan_api.lowering.ir import Lowered, Override
from plan_api.lowering.model_names import named_state
from plan_api.lowering.passes import fuse, resolve_overrides, schedules
from plan_api.lowering.resolve import resolve, resolve_eager, resolve_fully_shard
from plan_api.lowering.validate import check_cover, validate
from plan_api.spec.plan_entries import PlanEntries

__all__ = ["lower"]


def lower(plan: PlanEntries, model: nn.Module, *, strict: bool = False) -> Lowered:
    """Lowers a plan for a model: resolved, validated and fused; the model is not changed.

    Args:
        plan: any.
        model: on any device, ``meta`` included.
        strict: whether an override is an error.

    Raises:
        ValueError: the plan does not fit the model; see the message.
        ModuleNotFoundError: it asks for fully_shard, and no package offers it.
    """
    ops, overrides = resolve_overrides(resolve(plan, model))
    asked = resolve_fully_shard(plan, model)
    for entries in asked.values():
        overrides += [Override(*two) for two in pairwise(entries) if two[0] != two[1]]
    if overrides and strict:
        text = "\n".join(map(str, overrides))
        raise ValueError(
            f"strict=True: expected no overrides, got a plan that overrides itself:\n{text}"
        )
    placed = schedules(dict(named_state(model)), ops, plan.mesh)
    if plan.cover:
        check_cover(model, placed)
    fully_sharded = {name: entries[-1] for name, entries in asked.items()}
    validate(model, ops, placed, fully_sharded, plan.mesh)
    indices = expert_indices(ops, model, placed, plan.mesh)
    return Lowered(
        tuple(ops),
        tuple(overrides),
        tuple(fuse(ops)),
        MappingProxyType(placed),
        MappingProxyType(indices),
        MappingProxyType(fully_sharded),
        resolve_eager(plan, model),
    )
