"""Finds the expert numbers of each rank, for arguments that index into sharded parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plan_api.lowering.ir import (
    EntryRef,
    ExpertIndices,
    Op,
    OpKind,
    Schedule,
    SiteStep,
    TokenDispatch,
)
from plan_api.lowering.model_names import (
    argument_slot,
    named_state,
    positional_names,
    resolve_argument,
)
from plan_api.lowering.passes import fuse
from plan_api.spec.axes import axis_names

__all__ = [
    "ExpertDimSizes", "IndexingStep", "expert_dim_sizes", "expert_indices", "experts_of_ranks",
    "indexing_steps",
]  # fmt: skip


def expert_indices(
    ops: Iterable[Op], model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> dict[str, list[ExpertIndices]]:
    """Finds the arguments that index into sharded parameters, by the path of their module.

    Args:
        ops: of a plan that `validate` accepts.
        model: any; it is not changed.
        schedules: of its parameters, by their first names.
        mesh: of the plan.
    """
    found: dict[str, list[ExpertIndices]] = {}
    for indexing in indexing_steps(ops):
        module = model.get_submodule(indexing.path)
        axes = indexing.axes(mesh)
        sizes = expert_dim_sizes(indexing, model, schedules, mesh)
        number = next(iter(sizes.sharded.values()))  # all are equal
        own = _experts_of(number, mesh, axes, mesh.get_coordinate() or [0] * mesh.ndim)
        dispatch = None
        if indexing.step.kind is OpKind.DISPATCH:
            dispatch = _dispatch(indexing, module, experts_of_ranks(number, mesh, axes))
        found.setdefault(indexing.path, []).append(
            ExpertIndices(
                argument_slot(indexing.step.index, positional_names(module)),
                own,
                axes,
                _attributes(indexing.entry, len(own)),
                indexing.step,
                dispatch,
            )
        )
    return found


@dataclass(frozen=True)
class IndexingStep:
    """A step that makes an argument of a module index into the local experts.

    Attributes:
        path: of the module.
        step: of kind INDEX or DISPATCH.
        entry: of the plan, the last one that the step comes from.
    """

    path: str
    step: SiteStep
    entry: EntryRef

    def axes(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """Returns the numbers of the mesh axes along which experts are sharded."""
        return tuple(sorted(axis_names(mesh).index(axis) for axis in self.step.moves))

    @property
    def dim(self) -> int:
        """The dim of the parameters that is sharded."""
        return getattr(next(iter(self.step.moves.values())).dst, "dim", 0)


def indexing_steps(ops: Iterable[Op]) -> list[IndexingStep]:
    """Returns the steps of a plan's operations that index into sharded parameters."""
    indexing = [op for op in ops if op.kind in (OpKind.INDEX, OpKind.DISPATCH)]
    entries = {op.entry.number: op.entry for op in indexing}
    return [
        IndexingStep(site.path, step, entries[step.entries[-1]])
        for site in fuse(indexing)
        for step in site.steps
    ]


@dataclass(frozen=True)
class ExpertDimSizes:
    """The sizes of the dim along which a module's parameters are sharded by expert.

    Attributes:
        sharded: by the first name of the parameters that are sharded as the entry declares.
        other: by the first name of the module's other parameters.
    """

    sharded: Mapping[str, int]
    other: Mapping[str, int]


def expert_dim_sizes(
    indexing: IndexingStep, model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> ExpertDimSizes:
    """Returns the sizes of the expert dim of a module's parameters; `validate` compares them."""
    dim, axes = indexing.dim, indexing.axes(mesh)
    first_names = {id(tensor): name for name, tensor in reversed([*named_state(model)])}
    sharded: dict[str, int] = {}
    other: dict[str, int] = {}
    for param in model.get_submodule(indexing.path).parameters():
        name = first_names[id(param)]
        schedule = schedules.get(name)
        rest = schedule.rest if schedule is not None else ()
        along = tuple(
            axis for axis, placement in enumerate(rest) if getattr(placement, "dim", None) == dim
        )
        if along == axes and all(rest[axis] == Shard(dim) for axis in axes):
            sharded[name] = param.shape[dim]
        elif along or param.ndim > dim:
            other[name] = param.shape[dim]
    return ExpertDimSizes(sharded, other)


def _dispatch(
    indexing: IndexingStep, module: nn.Module, experts: tuple[range, ...]
) -> TokenDispatch:
    options, positional = dict(indexing.entry.options), positional_names(module)

    def slot(name: int | str) -> tuple[int, str]:
        description = indexing.entry.description
        return argument_slot(resolve_argument(description, indexing.path, module, name), positional)

    weights = options["weights"]
    return TokenDispatch(
        slot(options["tokens"]),
        None if weights is None else slot(weights),
        experts,
        indexing.step,
        options.get("chunks", 1),
        options.get("overlap"),
    )


def experts_of_ranks(number: int, mesh: DeviceMesh, axes: Sequence[int]) -> tuple[range, ...]:
    """Returns the expert numbers of all ranks along some axes, the first axis outermost."""
    coordinates = [0] * mesh.ndim
    found = []
    for along in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        for axis, coordinate in zip(axes, along, strict=True):
            coordinates[axis] = coordinate
        found.append(_experts_of(number, mesh, axes, coordinates))
    return tuple(found)


def _experts_of(
    number: int, mesh: DeviceMesh, axes: Iterable[int], coordinates: Sequence[int]
) -> range:
    """Returns one rank's experts, as DTensor's `Shard` splits them along one axis at a time."""
    own = range(number)
    for axis in axes:
        size, at = -(-len(own) // mesh.size(axis)), coordinates[axis]
        own = own[size * at : size * (at + 1)]
    return own


def _attributes(entry: EntryRef, own: int) -> dict[str, Any]:
    options = dict(entry.options)
    values = {options["count"]: own, options.get("flag"): True}
    return {name: value for name, value in values.items() if name is not None}
