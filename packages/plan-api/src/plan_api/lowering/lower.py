"""A plan resolved on one model: what there is to install, without touching the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from torch import nn

from plan_api.lowering.context_check import check_context
from plan_api.lowering.fuse import Override, Site, fuse, last_words
from plan_api.lowering.ir import Op
from plan_api.lowering.resolve import fully_sharded, is_inside, resolve, state_of, stays_eager
from plan_api.lowering.schedule import Schedule, schedules
from plan_api.lowering.units import check_units
from plan_api.ops.expert_indices import Indices, indices_of
from plan_api.ops.local_region import check_regions
from plan_api.runtime.fully_shard import check_fully_shard, check_phases
from plan_api.spec.entry import Entry
from plan_api.spec.plan import Plan

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """What a plan is for one model.

    Attributes:
        ops: that hold, in the order of the plan.
        overrides: what the plan said and took back.
        sites: the operations, fused.
        schedules: of parameters and buffers that the plan names, by their first name.
        indices: arguments that count what each rank has, by the module's path.
        fully_sharded: modules that fsdp is applied to, with the entries that say so.
        eager: modules that stay on DTensors in static mode, none inside of another.
    """

    ops: tuple[Op, ...]
    overrides: tuple[Override, ...]
    sites: tuple[Site, ...]
    schedules: Mapping[str, Schedule]
    indices: Mapping[str, Sequence[Indices]]
    fully_sharded: Mapping[str, Entry]
    eager: tuple[str, ...]

    def stays(self, path: str) -> bool:
        """Whether what has this path stays on DTensors in static mode."""
        return any(is_inside(path, module) for module in self.eager)


def lower(plan: Plan, model: nn.Module, *, strict: bool = False) -> Lowered:
    """A plan resolved on a model and fused, without touching it.

    Args:
        plan: any.
        model: on any device, ``meta`` included.
        strict: whether an override is an error.

    Raises:
        ValueError: the plan does not fit the model; see the message.
        ModuleNotFoundError: it asks for fully_shard, and no package offers it.
    """
    ops, overrides = last_words(resolve(plan, model))
    asked = fully_sharded(plan, model)
    for entries in asked.values():
        two = pairwise(entries)
        overrides += [Override(*each) for each in two if each[0] != each[1]]
    if overrides and strict:
        lines = "\n".join(map(str, overrides))
        raise ValueError(f"the plan overrides itself, under strict=True:\n{lines}")
    tensors = dict(state_of(model))
    placed = schedules(tensors, ops, plan.mesh)
    if plan.cover:
        _check_cover(placed, model)
    fully = {name: entries[-1] for name, entries in asked.items()}
    for entry in dict.fromkeys(fully.values()):
        check_fully_shard(entry, plan.mesh)
    check_phases(model, fully, placed, plan.entries, plan.mesh)
    check_regions(ops)
    check_context(ops, plan.entries, model, plan.mesh)
    check_units(ops, plan.entries, model, tensors, placed, plan.mesh)
    indices = indices_of(ops, plan.entries, model, placed, plan.mesh)
    return Lowered(
        tuple(ops), tuple(overrides), tuple(fuse(ops)), MappingProxyType(placed),
        MappingProxyType(indices), MappingProxyType(fully), stays_eager(plan, model),
    )  # fmt: skip


def _check_cover(placed: Mapping[str, Schedule], model: nn.Module) -> None:
    left = [name for name, _ in model.named_parameters() if name not in placed]
    if left:
        raise ValueError(
            "the plan has to cover every parameter (cover=True), and says nothing of: "
            + ", ".join(left)
        )
