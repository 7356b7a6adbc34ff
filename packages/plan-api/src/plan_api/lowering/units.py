"""Shards parameters in whole units, such as heads, that stay on one rank.

Where the axis divides the number of units, these are shards of DTensor. Otherwise Eager refuses
them: attention views one dim of a projection as heads and features, which DTensor cannot where a
shard ends within a head. In static mode modules view local tensors, so ranks have different numbers
of units, those of `torch.chunk`: the placement is ragged-shard's InterleavedShard with a ``unit``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from plan_api.lowering.ir import HookPoint, Op, OpKind, Schedule, UnevenUnits
from plan_api.lowering.model_names import is_inside, named_state
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import can_have_units, shard_of_units

__all__ = ["PlacedUnits", "check_units", "place_units"]

_Unit: TypeAlias = int | str | tuple[str, ...]


@dataclass(frozen=True)
class PlacedUnits:
    """The operations of a plan whose shards consist of whole units.

    Attributes:
        ops: with the placements of static mode.
        uneven: where ranks have different numbers of units.
    """

    ops: tuple[Op, ...]
    uneven: tuple[UnevenUnits, ...]


def check_units(
    ops: Sequence[Op], model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> None:
    """Refuses parameters that are sharded within a unit while their module runs.

    Nothing is refused in modules that run on local tensors, in those whose output the plan
    redistributes along the axis, which replicates it first, and for a single unit, whose dim torch
    drops.

    Args:
        ops: of the plan.
        model: any.
        schedules: of parameters, by their first names.
        mesh: of the plan.

    Raises:
        ValueError: names the entries, parameters and numbers of units.
    """
    found = _sharded_units(ops, model, schedules, mesh, groups=False)
    instead = "use mode='static' without example_inputs"
    _refuse([line for one in found for line in (*one.remainder(), *one.undivided(instead))])


def place_units(
    ops: Sequence[Op],
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
    eager: Sequence[str],
) -> PlacedUnits:
    """Shards parameters in whole units for static mode, where the axis does not divide them.

    Args:
        ops: of the plan.
        model: any.
        schedules: of parameters, by their first names.
        mesh: of the plan.
        eager: paths of modules that run on DTensors, where this is refused.

    Raises:
        ValueError: names the entries and parameters for which there is no such placement.
    """
    problems: list[str] = []
    uneven: dict[UnevenUnits, _ShardedUnits] = {}
    placed: dict[int, Op] = {}  # by the id of the operation of the plan
    for one in _sharded_units(ops, model, schedules, mesh, groups=True):
        wrong = [*one.remainder()]
        problems += wrong
        if wrong or not one.is_uneven:
            continue
        if any(is_inside(one.op.path, path) for path in eager):
            problems += one.undivided("leave it out of plan.eager()")
        elif len(one.axes) > 1 or not can_have_units(one.op.dst):
            problems.append(one.unplaceable())
        else:
            placed[id(one.op)] = replace(one.op, dst=shard_of_units(one.op.dst, one.size))
            uneven.setdefault(UnevenUnits(one.region, one.op.axis), one)
    for found, example in uneven.items():
        problems += _without_units(found, example, ops, placed, schedules, mesh)
    _refuse(problems)
    for op in ops:
        unit = _unit_of(op) if op.hook_point is HookPoint.OPERATOR else None
        if unit is None or not any(
            op.axis == one.axis and is_inside(op.path, one.region) for one in uneven
        ):
            continue
        size, _ = _unit_size(op, unit, model)
        if can_have_units(op.dst):
            placed[id(op)] = replace(op, dst=shard_of_units(op.dst, size))
    return PlacedUnits(tuple(placed.get(id(op), op) for op in ops), tuple(uneven))


@dataclass(frozen=True)
class _ShardedUnits:
    """A dim of a parameter that consists of units, and that an operation shards.

    Attributes:
        op: the operation.
        name: of the parameter.
        length: of the dim.
        parts: those of a fused projection, each of which is sharded.
        size: of a unit.
        unit: the text that names it.
        axes: the sizes of the axes that shard the dim while the module runs, by name.
    """

    op: Op
    name: str
    length: int
    parts: int
    size: int
    unit: str
    axes: Mapping[str, int]

    @property
    def number(self) -> int:
        """The number of units of a part."""
        return self.length // (self.parts * self.size)

    @property
    def is_uneven(self) -> bool:
        """Whether shards of equal sizes would end within a unit."""
        return self.number % math.prod(self.axes.values()) != 0

    @property
    def region(self) -> str:
        """The path of the module with the projection, such as attention."""
        return self.op.path.rpartition(".")[0]

    @property
    def _what(self) -> str:
        return f"{self.op.entry.description}: dim {self.op.dst.dim} of {self.name}"  # type: ignore[attr-defined]

    def remainder(self) -> Iterator[str]:
        """Yields what is wrong if the dim does not consist of whole units."""
        if self.length % (self.parts * self.size):
            yield f"{self._what} has size {self.length}, which is no multiple of {self.unit}"

    def undivided(self, instead: str) -> Iterator[str]:
        """Yields what is wrong for DTensors if the axes do not divide the units.

        Args:
            instead: how its module runs on local tensors, for which nothing is wrong.
        """
        if not self.is_uneven or self.number == 1:
            return
        along = " and ".join(f"{axis!r} of size {ranks}" for axis, ranks in self.axes.items())
        along = f"axis {along} does" if len(self.axes) == 1 else f"axes {along} do"
        yield (
            f"{self._what} is {self.number} times {self.unit}, and {along} not divide "
            f"{self.number}; {instead}, where ranks have different numbers of them, replicate it "
            f"there, by Replicate(), or gather what the module returns, by "
            f"shard('{self.op.path}.<out>', Replicate(), {self.op.axis!r})"
        )

    def unplaceable(self) -> str:
        """Returns what is wrong if ranks cannot have different numbers of units."""
        return (
            f"{self._what} is {self.number} times {self.unit}: expected one axis that shards it, "
            f"by Shard or InterleavedShard, whose ranks then have different numbers of them, got "
            f"{self.op.dst} along {', '.join(self.axes)}"
        )


def _sharded_units(
    ops: Sequence[Op],
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
    *,
    groups: bool,
) -> Iterator[_ShardedUnits]:
    """Yields the dims that are sharded in units while their module runs on shards.

    Units of several names are those of all names with ``groups``, and else those of the last one.
    """
    regions = {op.path for op in ops if op.kind is OpKind.LOCAL}
    # A sum over units, which is a module's output then, is no output that is gathered.
    redistributed = {
        (op.path, op.axis)
        for op in ops
        if op.hook_point is HookPoint.FORWARD and not isinstance(op.src, Partial)
    }
    tensors = dict(named_state(model))
    for op in ops:
        unit = _unit_of(op) if op.kind is OpKind.SHARD else None
        if unit is None or any(is_inside(op.path, region) for region in regions):
            continue
        name, dim = f"{op.path}.{op.tensor}".lstrip("."), getattr(op.dst, "dim", None)
        axes = {
            axis: mesh.size(at)
            for at, axis in enumerate(axis_names(mesh))
            if getattr(schedules[name].run[at], "dim", None) == dim
            and (op.path, axis) not in redistributed
        }
        if isinstance(dim, int) and op.axis in axes:
            size, text = _unit_size(op, unit if groups else _last_of(unit), model)
            parts: int = getattr(op.dst, "interleaves", 1)  # of ragged-shard's InterleavedShard
            length = tensors[name].shape[dim]
            yield _ShardedUnits(op, name, length, parts, size, text, axes)


def _without_units(
    uneven: UnevenUnits,
    example: _ShardedUnits,
    ops: Sequence[Op],
    placed: Mapping[int, Op],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> Iterator[str]:
    """Yields the parameters beside one that is sharded in units, and are sharded otherwise."""
    at = axis_names(mesh).index(uneven.axis)
    for op in ops:
        name = f"{op.path}.{op.tensor}"
        if (
            op.kind is OpKind.SHARD
            and op.axis == uneven.axis
            and id(op) not in placed
            and uneven.region
            and op.path.rpartition(".")[0] == uneven.region
            and schedules[name].run[at] == op.dst
            and getattr(op.dst, "dim", None) is not None
        ):
            yield (
                f"{op.entry.description}: expected unit= for {name}, as ranks along {op.axis!r} "
                f"have different numbers of the units of {example.name}, {example.unit}, got "
                f"{op.dst} of {'other units' if _unit_of(op) else 'none'}"
            )


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(
            "the plan shards dims within units that have to stay on one rank:\n"
            + "\n".join(problems)
        )


def _unit_of(op: Op) -> _Unit | None:
    unit: _Unit | None = dict(op.entry.options).get("unit")
    return unit


def _last_of(unit: _Unit) -> int | str:
    return unit[-1] if isinstance(unit, tuple) else unit


def _unit_size(op: Op, unit: _Unit, model: nn.Module) -> tuple[int, str]:
    """Returns the size of a unit, and the text that names it in messages."""
    if isinstance(unit, int):
        return unit, f"{unit}"
    found = [_attribute(op, name, model) for name in (unit if isinstance(unit, tuple) else (unit,))]
    return math.prod(size for size, _ in found), " times ".join(text for _, text in found)


def _attribute(op: Op, name: str, model: nn.Module) -> tuple[int, str]:
    parts = op.path.split(".") if op.path else []
    for count in range(len(parts), -1, -1):
        above = ".".join(parts[:count])
        size = getattr(model.get_submodule(above), name, None)
        if isinstance(size, SupportsIndex):
            return operator.index(size), f"{above or 'the model'}'s {name} ({operator.index(size)})"
    raise ValueError(
        f"{op.entry.description}: unit= expected a size, or the name of an integer attribute of "
        f"{op.path} or a module above it, got {name!r}, which none of them has"
    )
