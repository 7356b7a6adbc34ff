"""Which modules `fully_shard` is called on, and what each call manages."""

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
from fsdp.extension import is_extension
from fsdp.grouping import Dtypes, alike, balanced, dtypes_of, plan_buffer, specs_of
from fsdp.managed import Found, found_parameters, managed_modules
from fsdp.parameter import ManagedParameter
from fsdp.policy import Whole, block_size
from ragged_shard.planner import Layout, TensorSpec

__all__ = ["Group", "Unit", "Units", "plan_units", "units_of"]

Units: TypeAlias = "str | Callable[[str, nn.Module], bool] | Iterable[str | Sequence[str]] | None"


@dataclass(frozen=True, eq=False)
class Unit:
    """The modules of one call, and the parameters that it manages.

    Attributes:
        name: of the modules in the model; empty of the model itself.
        modules: they.
        found: the parameters, by names within the modules.
    """

    name: str
    modules: tuple[nn.Module, ...]
    found: tuple[Found, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters in one buffer, as `fully_shard` would plan it.

    Attributes:
        unit: place of the call that makes it in those that `units_of` gives.
        params: in the order of the layout.
        layout: of the buffer.
        dtypes: of the buffer's content.
        trained: whether there are gradients.
    """

    unit: int
    params: tuple[nn.Parameter, ...]
    layout: Layout
    dtypes: Dtypes
    trained: bool

    def buffer_bytes(self, dtype: torch.dtype) -> int:
        """Of all shards."""
        return self.layout.buffer_size * dtype.itemsize

    def shard_bytes(self, dtype: torch.dtype) -> int:
        """Of one."""
        return self.layout.shard_size * dtype.itemsize


def units_of(model: nn.Module, units: Units, ignored: Collection[nn.Parameter]) -> list[Unit]:
    """The calls of `fully_shard`, the model's first, the others in the order of their modules.

    Raises:
        ValueError: units that match no module, or none with parameters; a parameter in two units.
    """
    named = dict(model.named_modules())
    calls = {"": (model,)}
    for names in _chosen(named, units):
        calls[", ".join(names)] = tuple(named[name] for name in names)
    own = {module for modules in calls.values() for module in modules}
    found = []
    for name, modules in calls.items():
        params = found_parameters(managed_modules(modules, own.__contains__), ignored)
        if name and not params:
            raise ValueError(
                f"simulate: units name {name!r}, which has no parameters that no other unit has; "
                f"leave it out"
            )
        found.append(Unit(name, modules, tuple(params)))
    owners: dict[int, str] = {}
    for unit in found:
        for one in unit.found:
            full = f"{unit.name}.{one.name}" if unit.name else one.name
            if id(one.param) in owners:
                raise ValueError(
                    f"simulate: parameter {full!r} is tied to {owners[id(one.param)]!r} of another "
                    f"unit, which fully_shard refuses; put both into one unit, (a, b)"
                )
            owners[id(one.param)] = full
    return found


def plan_units(
    units: Sequence[Unit],
    ranks: int,
    shard_placement_fn: PlacementFn | None,
    mp_policy: MixedPrecisionPolicy,
) -> list[Group]:
    """The groups of all units, planned as `fully_shard` plans them on `ranks` ranks.

    Raises:
        ValueError: a granularity that is none; a parameter that has to be planned on ranks, as it
            is a DTensor, gathers itself, or is given a mesh of its own.
    """
    plan = cache(plan_buffer)  # layers are alike
    these_ranks = object()  # a balance that was given counts for this plan alone
    groups = []
    for number, unit in enumerate(units):
        params = [_managed(one, unit.name, shard_placement_fn) for one in unit.found]
        for same in alike(params, mp_policy):
            first = same[0].given
            dtypes = dtypes_of(first.dtype, _compat.policy_of(first, mp_policy))
            specs: tuple[TensorSpec, ...] = specs_of(same)
            layout = balanced(plan(specs, ranks, dtypes), same, these_ranks)
            given = tuple(param.given for param in same)
            groups.append(Group(number, given, layout, dtypes, first.requires_grad))
    return groups


def _managed(one: Found, unit: str, shard_placement_fn: PlacementFn | None) -> ManagedParameter:
    name, param = one.name, one.param
    full = f"{unit}.{name}" if unit else name
    chosen = None if shard_placement_fn is None else shard_placement_fn(param)
    if isinstance(param, DTensor) or is_extension(param, full):
        raise ValueError(
            f"simulate: parameter {full!r} is a {type(param.data).__name__}, which is planned "
            f"where its mesh is; wants plain tensors"
        )
    if hasattr(chosen, "mesh_info"):
        raise ValueError(
            f"simulate: shard_placement_fn gave {full!r} a mesh of its own; wants a granularity"
        )
    block = block_size(chosen, param.shape, full)
    whole = chosen if isinstance(chosen, Whole) else None
    return ManagedParameter(name, param, one.places, block, mesh=None, whole=whole)


def _chosen(named: dict[str, nn.Module], units: Units) -> list[tuple[str, ...]]:
    """Names of the modules of each call, in the order of modules, without the model itself."""
    if units is None:
        return []
    chosen: list[tuple[str, ...]]
    if isinstance(units, str):
        pattern = re.compile(units)
        chosen = [(name,) for name in named if name and pattern.fullmatch(name)]
    elif callable(units):
        chosen = [(name,) for name, module in named.items() if name and units(name, module)]
    else:
        chosen = [(one,) if isinstance(one, str) else tuple(one) for one in units]
    unknown = [name for names in chosen for name in names if name not in named or not name]
    if unknown or not chosen:
        shown = ", ".join(list(named)[1:6])
        raise ValueError(
            f"simulate: units={units!r} match {'no ' + repr(unknown) if unknown else 'no module'}; "
            f"wants a regular expression of whole names, a function of name and module, or a list "
            f"of names; the model has {shown}, ..."
        )
    order = {name: place for place, name in enumerate(named)}
    return sorted(chosen, key=lambda names: order[names[0]])
