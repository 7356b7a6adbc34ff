"""Applies the fsdp package to modules whose other parameters are placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.fully_shard import entry_for, is_sharded_by_plan
from plan_api.lowering.ir import FullyShard, Schedule, ShardValues
from plan_api.lowering.model_names import is_inside
from plan_api.ops.low_precision.experts import is_experts, takes_transposes
from plan_api.ops.low_precision.weights import GatheredOperand
from plan_api.spec.fully_shard_package import find_fully_shard
from plan_api.spec.policies import VALUES, PolicyValue

__all__ = ["apply_fully_shard"]


def apply_fully_shard(
    model: nn.Module,
    entries: Mapping[str, FullyShard],
    schedules: Mapping[str, Schedule],
    values: Mapping[str, ShardValues],
    mesh: DeviceMesh,
    grad_placements_fn: Callable[[nn.Parameter], Sequence[Placement] | None] | None = None,
) -> None:
    """Applies fully_shard to modules, the innermost first, as FSDP requires.

    Parameters that the plan shards along the same axes, such as experts, are ignored.

    Args:
        model: whose parameters are placed.
        entries: by module path, the last that names it.
        schedules: of parameters, by their first names.
        values: granularities, and forms in which parameters are gathered, by their first names.
        mesh: of the plan.
        grad_placements_fn: see `find_fully_shard`; None: modules compute with DTensors.
    """
    if not entries:
        return
    # Once for all modules: the metadata of all installed packages are read.
    fully_shard = find_fully_shard(next(iter(entries.values())).description)
    # Each mesh is made once: it may have process groups of its own.
    meshes: dict[tuple[Any, ...], DeviceMesh] = {}
    for path in sorted(entries, key=lambda path: -path.count(".") if path else 1):
        entry = entries[path]
        options = {
            name: value.make() if isinstance(value, PolicyValue) else value
            for name, value in entry.options
            if name not in VALUES
        }
        # By the parameters that modules have now: DTensors, which replace those of the plan.
        of_param = {
            id(param): values[name]
            for name, param in model.named_parameters()
            if name in values and is_inside(name, path) and entry_for(name, entries) is entry
        }
        if any(one.granularity is not None for one in of_param.values()):
            options["shard_placement_fn"] = partial(_granularity_of, of_param)
        if any(one.quantize is not None or one.operand is not None for one in of_param.values()):
            options["quantize_fn"] = partial(_form_of, of_param, _transposed_weights(model))
        key = entry.axes, options.pop("flat", False), options.pop("replicate", 1)
        if key not in meshes:
            meshes[key] = _mesh_of(entry, mesh)
        ignored = [
            param
            for name, param in model.named_parameters()
            if is_inside(name, path) and is_sharded_by_plan(name, entry, schedules, mesh)
        ]
        if ignored:
            options["ignored_params"] = ignored
        if grad_placements_fn is not None:
            options["grad_placements_fn"] = grad_placements_fn
        fully_shard(model.get_submodule(path), mesh=meshes[key], **options)


def _granularity_of(of_param: Mapping[int, ShardValues], param: nn.Parameter) -> Any:
    value = of_param.get(id(param), ShardValues()).granularity
    return None if value is None else value.make()


def _transposed_weights(model: nn.Module) -> frozenset[int]:
    """Returns the ids of the parameters of experts whose products take their transposes."""
    return frozenset(
        id(param)
        for module in model.modules()
        if is_experts(module) and takes_transposes(module)
        for param in module.parameters(recurse=False)
    )


def _form_of(
    of_param: Mapping[int, ShardValues], transposed: frozenset[int], param: nn.Parameter
) -> Any:
    """Returns the form in which a parameter is gathered, or None."""
    values = of_param.get(id(param), ShardValues())
    if values.operand is not None:
        return GatheredOperand(values.operand, transposed=id(param) in transposed)
    return None if values.quantize is None else values.quantize.make()


def _mesh_of(entry: FullyShard, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of an entry: its axes, flattened if asked, of which one is split in two."""
    options, own = dict(entry.options), mesh[entry.axes]
    if options.get("flat") and own.ndim > 1:
        own = own._flatten()
    replicas = options.get("replicate", 1)
    if replicas == 1:
        return own
    name, sizes = "_".join(entry.axes), (replicas, own.size() // replicas)
    # By number: torch 2.11 refuses a name that the mesh has ("is not in").
    return own._unflatten(0, sizes, (f"{name}_replicate", f"{name}_shard"))
