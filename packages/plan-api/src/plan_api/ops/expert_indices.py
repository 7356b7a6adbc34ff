"""Arguments that are indices into parameters of which each rank has its part.

A module that loops over its experts finds them by their numbers. Where they are divided among the
ranks of an axis, and the module runs on local tensors, these numbers have to become this rank's
own: 0 up to as many as it has. For what other ranks have it is that number itself, which modules
leave out that know expert parallelism, as transformers' do; or what has chosen it is sent to the
rank that has it (`plan_api.ops.expert_dispatch`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.fuse import Step, fuse
from plan_api.lowering.ir import Act, Op
from plan_api.lowering.resolve import argument_of, is_inside, state_of
from plan_api.lowering.schedule import Schedule
from plan_api.ops.expert_dispatch import Dispatch, Dispatching
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import argument_at, given_at, places_of, replaced_at
from plan_api.spec.axes import axis_names
from plan_api.spec.entry import Entry

__all__ = ["Indices", "indices_of", "install_indices"]


@dataclass(frozen=True)
class Indices:
    """One argument of one module, and what of it is this rank's.

    Attributes:
        place: of the argument, where it is given by place.
        name: of it, where it is given by name.
        own: the numbers that this rank has.
        axes: of the mesh, by number, along which they are divided.
        attributes: that the module has while it runs.
        step: of the plan.
        dispatch: how what has chosen a number is sent to the rank that has it; None: all ranks
            along the axes have everything, and leave out what others have.
    """

    place: int
    name: str
    own: range
    axes: tuple[int, ...]
    attributes: Mapping[str, Any]
    step: Step
    dispatch: Dispatch | None = None

    @property
    def at(self) -> tuple[int, str]:
        """The place and the name of the argument."""
        return self.place, self.name

    def renumber(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with this one counted as this rank counts.

        Raises:
            ValueError: it has no integers.
        """
        given = given_at(self.at, args, kwargs)
        return replaced_at(self.at, args, kwargs, map_tensors(given, self._renumbered))

    def _renumbered(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(
                f"{self.name}: expected a tensor of integers, which count what is divided, got "
                f"{tensor.dtype}; name the argument that has them in index()"
            )
        here = (tensor >= self.own.start) & (tensor < self.own.stop)
        return torch.where(here, tensor - self.own.start, len(self.own))


def install_indices(
    module: nn.Module, indices: Sequence[Indices], mesh: DeviceMesh, path: str
) -> list[RemovableHandle]:
    """Hooks of a module that sees plain tensors, and is told of what this rank has.

    They come after those that give it plain tensors, and before those that move what it returns.

    Args:
        module: any.
        indices: of it.
        mesh: the plan's; all its ranks call.
        path: of the module, for messages.
    """
    handles = []
    for one in indices:
        at = StepContext(path or "the model", one.step)
        if one.dispatch is None:
            renumber = at.wrap(one.renumber)
            handles.append(_before(module, lambda _, *given, renumber=renumber: renumber(*given)))
            continue
        sending = Dispatching(one.dispatch, one.at, one.own, one.axes, mesh, path)
        handles += [
            _before(module, at.wrap(sending.enter)), _after(module, at.wrap(sending.leave)),
        ]  # fmt: skip
    attributes = _Attributes({name: own for one in indices for name, own in one.attributes.items()})
    return [*handles, _before(module, attributes.lend), _after(module, attributes.take_back)]


def _before(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    return module.register_forward_hook(hook, prepend=True, always_call=True)


class _Attributes:
    """What a module has while it runs on what this rank has."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = own
        self._had: dict[str, Any] = {}

    def lend(self, module: nn.Module, *_: Any) -> None:
        for name, own in self._own.items():
            self._had[name] = getattr(module, name)
            setattr(module, name, own)

    def take_back(self, module: nn.Module, *_: Any) -> None:
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
    found: dict[str, list[Indices]] = {}
    for path, step in _steps(ops):
        module, entry = model.get_submodule(path), entries[step.entries[-1]]
        if not any(is_inside(path, region) for region in regions):
            axes_said = ", ".join(map(repr, step.moves))
            raise ValueError(
                f"{entry.said}: {path} runs on DTensors, whose indices count the whole; add "
                f"local({path!r}, Partial(), {axes_said})"
            )
        axes = tuple(sorted(axis_names(mesh).index(axis) for axis in step.moves))
        number = _number(path, step, axes, entry, model, schedules)
        parts = _parts(number, mesh, axes)
        if not parts[-1]:
            raise ValueError(
                f"{entry.said}: {number} do not give each rank one: there are {len(parts)} ranks, "
                f"and they are cut as by torch.chunk; divide them among fewer"
            )
        own = _part(number, mesh, axes, mesh.get_coordinate() or [0] * mesh.ndim)
        attributes = _attributes(entry, module, number, len(own))
        place, name = argument_at(step.index, places_of(module))
        dispatch = None
        if step.act is Act.DISPATCH:
            dispatch = _dispatch(path, module, parts, step, entry)
        those = found.setdefault(path, [])
        if those and (dispatch or those[0].dispatch):
            raise ValueError(
                f"{entry.said}: {path} has another argument that counts what is divided; tokens "
                f"are dispatched by one"
            )
        those.append(Indices(place, name, own, axes, attributes, step, dispatch))
    return found


def _steps(ops: Iterable[Op]) -> Iterator[tuple[str, Step]]:
    """What is said of each argument, along all axes together; by the path of its module."""
    for site in fuse(op for op in ops if op.act in (Act.INDEX, Act.DISPATCH)):
        for step in site.steps:
            yield site.path, step


def _dispatch(
    path: str, module: nn.Module, parts: tuple[range, ...], step: Step, entry: Entry
) -> Dispatch:
    options, places = dict(entry.options), places_of(module)

    def argument(name: int | str) -> tuple[int, str]:
        return argument_at(argument_of(entry, path, module, name), places)

    weights = options["weights"]
    return Dispatch(
        argument(options["tokens"]), None if weights is None else argument(weights), parts, step
    )


def _parts(number: int, mesh: DeviceMesh, axes: Sequence[int]) -> tuple[range, ...]:
    """Those of all ranks along axes, the first of them outermost."""
    at = [0] * mesh.ndim
    found = []
    for place in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        for axis, coordinate in zip(axes, place, strict=True):
            at[axis] = coordinate
        found.append(_part(number, mesh, axes, at))
    return tuple(found)


def _part(number: int, mesh: DeviceMesh, axes: Iterable[int], coordinates: Sequence[int]) -> range:
    """Those that a rank has, as torch's `Shard` cuts: along one axis after the other."""
    own = range(number)
    for axis in axes:
        size, at = -(-len(own) // mesh.size(axis)), coordinates[axis]
        own = own[size * at : size * (at + 1)]
    return own


def _number(
    path: str,
    step: Step,
    axes: tuple[int, ...],
    entry: Entry,
    model: nn.Module,
    schedules: Mapping[str, Schedule],
) -> int:
    """How many there are, of the parameters that are divided."""
    dim = getattr(next(iter(step.moves.values())).dst, "dim", 0)
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
    count, flag = options["count"], options.get("flag")
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
