"""Which weights fully_shard gathers as operands of low-precision products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.fully_shard import entry_for, is_sharded_by_plan
from plan_api.lowering.ir import FullyShard, ModulePolicy, Schedule, ShardValues
from plan_api.ops.low_precision.experts import expert_weights, is_experts
from plan_api.ops.low_precision.recipes import Recipe
from plan_api.ops.low_precision.weights import GatheredOperand
from plan_api.spec.fully_shard_package import find_fully_shard

__all__ = ["recipes_of_weights", "values_with_operands"]

_KEEP_PARAMETERS = ("ddp", "zero1", "zero2")  # placements of fully_shard that gather no bytes


def values_with_operands(
    values: Mapping[str, ShardValues],
    model: nn.Module,
    precisions: Mapping[str, ModulePolicy],
    entries: Mapping[str, FullyShard],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> dict[str, ShardValues]:
    """Adds the recipes of weights that are quantized before they are gathered.

    Others are gathered in the dtype of compute, and quantized afterwards, to the same bits: those
    that other modules use, of which the plan gives ranks unequal parts while they are used, that a
    granularity would split in blocks with a scale, or that stay gathered; and where backward
    gathers other bytes than forward, those that are resharded over fewer ranks.

    Args:
        values: of parameters, by their first names.
        model: any; it is not changed.
        precisions: the recipes of linear layers and experts, by path.
        entries: of fully_shard, by path.
        schedules: of parameters, by their first names.
        mesh: of the plan.
    """
    found = dict(values)
    for name, recipe in recipes_of_weights(model, precisions).items():
        entry, schedule = entry_for(name, entries), schedules.get(name)
        if entry is None or is_sharded_by_plan(name, entry, schedules, mesh):
            continue
        before, form = values.get(name, ShardValues()), GatheredOperand(recipe)
        run = () if schedule is None else schedule.run
        # `resolve_precision` has checked that each rank's part has whole blocks.
        shape = _even_shape(model.get_parameter(name), run, mesh)
        if shape is not None and before.quantize is None and _gathers(entry, form, before, shape):
            found[name] = replace(before, operand=recipe)
    return found


def _even_shape(
    weight: nn.Parameter, placements: Sequence[Placement], mesh: DeviceMesh
) -> tuple[int, ...] | None:
    """Returns the shape of each rank's part; None: they are not equal."""
    shape = list(weight.shape)
    for axis, placement in enumerate(placements):
        dim, ranks = getattr(placement, "dim", None), mesh.size(axis)
        if dim is None:
            continue
        # Of ragged-shard's: each part of a fused projection is sharded, in whole units.
        parts = getattr(placement, "interleaves", 1) * getattr(placement, "unit", 1)
        if shape[dim] % (ranks * parts):
            return None
        shape[dim] //= ranks
    return tuple(shape)


def recipes_of_weights(
    model: nn.Module, precisions: Mapping[str, ModulePolicy]
) -> dict[str, Recipe]:
    """Returns the recipes of weights that all modules that have them multiply by one recipe.

    Args:
        model: any.
        precisions: the recipes of linear layers and experts, by path.
    """
    recipes: dict[int, list[Recipe | None]] = {}
    for path, module in model.named_modules():
        weights = expert_weights(module) if is_experts(module) else ("weight",)
        for key, param in module.named_parameters(recurse=False):
            policy = precisions.get(path) if key in weights else None
            recipes.setdefault(id(param), []).append(None if policy is None else policy.value)
    found = {}
    for name, param in model.named_parameters():
        first, *others = recipes[id(param)]
        if first is not None and all(one == first for one in others):
            found[name] = first
    return found


def _gathers(
    entry: FullyShard, form: GatheredOperand, values: ShardValues, shape: tuple[int, ...]
) -> bool:
    """Whether the options of an entry let its parameters be gathered in a form."""
    options: dict[str, Any] = dict(entry.options)
    if options.get("placements") in _KEEP_PARAMETERS:
        return False
    reshards = options.get("reshard_after_forward")
    if form.differs_in_backward and reshards not in (None, False, True):
        return False
    if values.granularity is None:
        return True
    package: Any = find_fully_shard(entry.description)
    keeps: bool = package.keeps_blocks(values.granularity.make(), form.block(shape), shape)
    return keeps
