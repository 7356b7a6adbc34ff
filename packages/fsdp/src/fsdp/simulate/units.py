"""The units of a model, one for each call of `fully_shard`, and the groups planned for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp import _compat
from fsdp.api import PlacementFn
from fsdp.granularity import Whole, block_size
from fsdp.param import FSDPParam, NamedParam, has_extension, managed_modules, named_params
from fsdp.param_group import (
    Dtypes,
    balance_owners,
    dtypes_of,
    group_params,
    plan_buffer,
    tensor_specs,
)
from ragged_shard.planner import Layout, TensorSpec

__all__ = ["PlannedGroup", "Unit", "Units", "find_units", "plan_groups"]

Units: TypeAlias = "str | Callable[[str, nn.Module], bool] | Iterable[str | Sequence[str]] | None"


@dataclass(frozen=True, eq=False)
class Unit:
    """The modules of one call of `fully_shard`, and the parameters that it manages.

    Attributes:
        name: names of the modules in the model; empty for the model itself.
        modules: the modules.
        found: the parameters, with their names within the modules.
    """

    name: str
    modules: tuple[nn.Module, ...]
    found: tuple[NamedParam, ...]


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """A parameter group of `fully_shard`, that is parameters in one buffer.

    Attributes:
        unit: index of its unit in the result of `find_units`.
        params: the parameters, in the order of the layout.
        layout: layout of the buffer.
        dtypes: dtypes of the sharded parameters, of computation and of reduction.
        trained: whether the parameters have gradients.
    """

    unit: int
    params: tuple[nn.Parameter, ...]
    layout: Layout
    dtypes: Dtypes
    trained: bool

    def buffer_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the unsharded buffer, padding included."""
        return self.layout.buffer_size * dtype.itemsize

    def shard_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a rank's shard of the buffer."""
        return self.layout.shard_size * dtype.itemsize


def find_units(model: nn.Module, units: Units, ignored: Collection[nn.Parameter]) -> list[Unit]:
    """Returns the units of a model: the model itself, then the others in the order of its modules.

    Args:
        model: the model.
        units: which modules are units, see `simulate`.
        ignored: parameters that no unit manages.

    Raises:
        ValueError: `units` matches no module, or one without parameters of its own; a parameter is
            in two units.
    """
    named = dict(model.named_modules())
    calls = {"": (model,)}
    for names in _unit_names(named, units):
        calls[", ".join(names)] = tuple(named[name] for name in names)
    own = {module for modules in calls.values() for module in modules}
    found = []
    for name, modules in calls.items():
        params = named_params(managed_modules(modules, own.__contains__), ignored)
        if name and not params:
            raise ValueError(
                f"simulate: expected each unit to have parameters that are in no other unit, got "
                f"{name!r}, which has none; remove it from units"
            )
        found.append(Unit(name, modules, tuple(params)))
    owners: dict[int, str] = {}
    for unit in found:
        for one in unit.found:
            full = f"{unit.name}.{one.name}" if unit.name else one.name
            if id(one.param) in owners:
                raise ValueError(
                    f"simulate: expected each parameter to be in one unit, got {full!r}, which is "
                    f"tied to {owners[id(one.param)]!r} of another unit; make the modules of both "
                    f"one unit, as a tuple in units"
                )
            owners[id(one.param)] = full
    return found


def plan_groups(
    units: Sequence[Unit],
    ranks: int,
    shard_placement_fn: PlacementFn | None,
    mp_policy: MixedPrecisionPolicy,
) -> list[PlannedGroup]:
    """Plans the groups of all units as `fully_shard` does on `ranks` ranks.

    Raises:
        ValueError: a granularity is not valid; or a parameter can be planned on real ranks only,
            because it is a DTensor, has an all-gather extension or gets a mesh of its own.
    """
    plan = cache(plan_buffer)  # the layers of a model often have the same specs
    balance_key = object()  # a balance that the user gave is counted for this plan alone
    groups = []
    for index, unit in enumerate(units):
        params = [_managed(one, unit.name, shard_placement_fn) for one in unit.found]
        for same in group_params(params, mp_policy):
            first = same[0].orig_param
            dtypes = dtypes_of(first.dtype, _compat.policy_of(first, mp_policy))
            specs: tuple[TensorSpec, ...] = tensor_specs(same)
            layout = balance_owners(plan(specs, ranks, dtypes), same, balance_key)
            originals = tuple(param.orig_param for param in same)
            groups.append(PlannedGroup(index, originals, layout, dtypes, first.requires_grad))
    return groups


def _managed(one: NamedParam, unit: str, shard_placement_fn: PlacementFn | None) -> FSDPParam:
    name, param = one.name, one.param
    full = f"{unit}.{name}" if unit else name
    granularity = None if shard_placement_fn is None else shard_placement_fn(param)
    if isinstance(param, DTensor) or has_extension(param, full):
        raise ValueError(
            f"simulate: expected parameter {full!r} to be a plain tensor, got a "
            f"{type(param.data).__name__}, which can be planned on real ranks only"
        )
    if hasattr(granularity, "mesh_info"):
        raise ValueError(
            f"simulate: expected shard_placement_fn to return a granularity for {full!r}, got a "
            f"result with a mesh of its own"
        )
    block = block_size(granularity, param.shape, full)
    whole = granularity if isinstance(granularity, Whole) else None
    return FSDPParam(name, param, one.locations, block, mesh=None, whole=whole)


def _unit_names(named: dict[str, nn.Module], units: Units) -> list[tuple[str, ...]]:
    """Returns the names of the modules of each unit but the model, in the order of the modules."""
    if units is None:
        return []
    found: list[tuple[str, ...]]
    if isinstance(units, str):
        pattern = re.compile(units)
        found = [(name,) for name in named if name and pattern.fullmatch(name)]
    elif callable(units):
        found = [(name,) for name, module in named.items() if name and units(name, module)]
    else:
        found = [(one,) if isinstance(one, str) else tuple(one) for one in units]
    unknown = [name for names in found for name in names if name not in named or not name]
    if unknown or not found:
        shown = ", ".join(list(named)[1:6])
        raise ValueError(
            f"simulate: expected units to be a regular expression that matches full names of "
            f"modules, a function of name and module, or a list of names, got {units!r}, which "
            f"matches no {unknown or 'module'}; the model has {shown}, ..."
        )
    order = {name: position for position, name in enumerate(named)}
    return sorted(found, key=lambda names: order[names[0]])
