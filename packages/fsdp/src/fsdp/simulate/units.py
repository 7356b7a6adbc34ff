"""The units of a model: the modules of each call of `fully_shard`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.param import NamedParam, has_extension, managed_modules, named_params

__all__ = ["Unit", "Units", "find_units"]

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
        others = own.difference(modules)
        params = named_params(managed_modules(modules, others.__contains__), ignored)
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
            _check_plain(one, full)
            if id(one.param) in owners:
                raise ValueError(
                    f"simulate: expected each parameter to be in one unit, got {full!r}, which is "
                    f"tied to {owners[id(one.param)]!r} of another unit; make the modules of both "
                    f"one unit, as a tuple in units"
                )
            owners[id(one.param)] = full
    return found


def _check_plain(one: NamedParam, name: str) -> None:
    """Refuses parameters whose placement depends on other ranks.

    Raises:
        ValueError: it is a DTensor or has an all-gather extension.
    """
    if isinstance(one.param, DTensor) or has_extension(one.param, name):
        raise ValueError(
            f"simulate: expected parameter {name!r} to be a plain tensor, got a "
            f"{type(one.param.data).__name__}, which can be planned on real ranks only"
        )


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
