"""Arguments that are indices into parameters of which each rank has its part.

A module that loops over its experts finds them by their numbers. Where they are divided among the
ranks of an axis, and the module runs on local tensors, these numbers have to become this rank's
own: 0 up to as many as it has, and that number itself for all that other ranks have. It is what
modules leave out that know expert parallelism, as transformers' do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plan_api.axes import axis_names
from plan_api.containers import map_tensors
from plan_api.entry import Entry
from plan_api.hooks import argument_at, places_of
from plan_api.ir import Act, Op
from plan_api.resolve import state_of
from plan_api.schedule import Schedule

__all__ = ["Counting", "Indices", "indices_of"]


@dataclass(frozen=True)
class Indices:
    """One argument of one module, and what of it is this rank's.

    Attributes:
        place: of the argument, where it is given by place.
        name: of it, where it is given by name.
        own: the numbers that this rank has.
        axes: of the mesh, by number, along which they are divided.
        attributes: that the module has while it runs.
    """

    place: int
    name: str
    own: range
    axes: tuple[int, ...]
    attributes: Mapping[str, Any]

    def renumber(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with this one counted as this rank counts."""
        if self.place < len(args):
            new = map_tensors(args[self.place], self._renumbered)
            return (*args[: self.place], new, *args[self.place + 1 :]), kwargs
        if self.name in kwargs:
            return args, {**kwargs, self.name: map_tensors(kwargs[self.name], self._renumbered)}
        return args, kwargs

    def _renumbered(self, tensor: torch.Tensor) -> torch.Tensor:
        here = (tensor >= self.own.start) & (tensor < self.own.stop)
        return torch.where(here, tensor - self.own.start, len(self.own))


class Counting:
    """What a module is told while it runs on what this rank has.

    Args:
        indices: of one module.
    """

    def __init__(self, indices: Sequence[Indices]) -> None:
        self._indices = indices
        self._attributes = {name: own for one in indices for name, own in one.attributes.items()}
        self._had: dict[str, Any] = {}

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before it runs: its arguments, and its attributes, count what this rank has."""
        for index in self._indices:
            args, kwargs = index.renumber(args, kwargs)
        for name, own in self._attributes.items():
            self._had[name] = getattr(module, name)
            setattr(module, name, own)
        return args, kwargs

    def leave(self, module: nn.Module, *_: Any) -> None:
        """When it has run: its attributes count all again."""
        while self._had:
            setattr(module, *self._had.popitem())


def indices_of(
    ops: Iterable[Op],
    entries: Sequence[Entry],
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> dict[str, list[Indices]]:
    """The indices of every module that has some, by its path.

    Args:
        ops: of a plan.
        entries: the plan's.
        model: any; it is not changed.
        schedules: of its parameters, by their first names.
        mesh: the plan's.

    Raises:
        ValueError: what they count is not divided as the plan says, or not every rank has some, or
            the module does not run on local tensors; names the entry.
    """
    ops = list(ops)
    regions = {op.path for op in ops if op.act is Act.LOCAL}
    groups: dict[tuple[str, int | str], list[Op]] = {}
    for op in ops:
        if op.act is Act.INDEX:
            groups.setdefault((op.path, op.index), []).append(op)
    found: dict[str, list[Indices]] = {}
    for (path, index), group in groups.items():
        module, entry = model.get_submodule(path), entries[group[-1].entry]
        if path not in regions:
            axes_said = ", ".join(repr(op.axis) for op in group)
            raise ValueError(
                f"{entry.said}: {path} runs on DTensors, whose indices count the whole; add "
                f"local({path!r}, Partial(), {axes_said})"
            )
        axes = tuple(sorted(axis_names(mesh).index(op.axis) for op in group))
        number = _number(group, axes, entry, model, schedules)
        last = _part(number, mesh, axes, [size - 1 for size in mesh.shape])
        if not last:
            raise ValueError(
                f"{entry.said}: {number} do not give each rank one: there are "
                f"{math.prod(mesh.size(axis) for axis in axes)} ranks, and they are cut as by "
                f"torch.chunk; divide them among fewer"
            )
        own = _part(number, mesh, axes, mesh.get_coordinate() or [0] * mesh.ndim)
        attributes = _attributes(entry, module, number, len(own))
        place, name = argument_at(index, places_of(module))
        found.setdefault(path, []).append(Indices(place, name, own, axes, attributes))
    return found


def _part(number: int, mesh: DeviceMesh, axes: Iterable[int], coordinates: Sequence[int]) -> range:
    """Those that a rank has, as torch's `Shard` cuts: along one axis after the other."""
    own = range(number)
    for axis in axes:
        size, at = -(-len(own) // mesh.size(axis)), coordinates[axis]
        own = own[size * at : size * (at + 1)]
    return own


def _number(
    group: Sequence[Op],
    axes: tuple[int, ...],
    entry: Entry,
    model: nn.Module,
    schedules: Mapping[str, Schedule],
) -> int:
    """How many there are, of the parameters that are divided."""
    path, dim = group[0].path, getattr(group[0].dst, "dim", 0)
    first = {id(tensor): name for name, tensor in reversed([*state_of(model)])}
    sizes: dict[str, int] = {}
    whole: dict[str, int] = {}
    for param in model.get_submodule(path).parameters():
        name = first[id(param)]
        schedule = schedules.get(name)
        rest = schedule.rest if schedule is not None else ()
        cut = tuple(axis for axis, one in enumerate(rest) if getattr(one, "dim", None) == dim)
        exact = cut == axes and all(rest[axis] == Shard(dim) for axis in axes)
        if exact:
            sizes[name] = param.shape[dim]
        elif cut or param.ndim > dim:
            whole[name] = param.shape[dim]
    for name, size in whole.items():
        if size in sizes.values():
            raise ValueError(
                f"{entry.said}: dim {dim} of {name} has {size} as well, and is not divided like "
                f"that of {', '.join(sizes)}: place it by Shard({dim}) along the same axes, alone"
            )
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "none"
        raise ValueError(
            f"{entry.said}: counts what parameters of {path} have along dim {dim}, divided along "
            f"these axes; there has to be one number of them; found: {told}"
        )
    return next(iter(sizes.values()))


def _attributes(entry: Entry, module: nn.Module, number: int, own: int) -> dict[str, Any]:
    options = dict(entry.options)
    count, flag = options["count"], options["flag"]
    for name in (count, flag):
        if name is not None and not hasattr(module, name):
            raise ValueError(f"{entry.said}: {type(module).__name__} has no attribute {name!r}")
    if count is not None and getattr(module, count) != number:
        raise ValueError(
            f"{entry.said}: count names the attribute that has how many there are, {number}, but "
            f"{count} is {getattr(module, count)!r}"
        )
    given = {count: own, flag: True}
    return {name: value for name, value in given.items() if name is not None}
