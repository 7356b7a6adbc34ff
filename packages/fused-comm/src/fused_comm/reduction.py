"""What a gradient needs: the mesh axes along which it is summed, and the placement of the sum.

Note: a gradient is *pending* along a mesh axis where it is Partial: each rank has a part of the
sum. Its *target* is its parameter's placement there. Where that is Replicate the axis is *reduced*
(an all-reduce), where it is Shard it is *scattered* (a reduce-scatter).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from fused_comm.sharding import scatter_dim

__all__ = [
    "Reduction", "ReductionSpec", "ScatteredAxis", "reduction_from_spec", "reduction_of",
    "reduction_to",
]  # fmt: skip


@dataclass(frozen=True)
class ScatteredAxis:
    """A mesh axis that is reduce-scattered, and the tensor dim that is sharded along it."""

    axis: int
    dim: int


@dataclass(frozen=True)
class ReductionSpec:
    """The fields of a `Reduction` that ranks send to each other; the parameter implies the rest."""

    reduced: tuple[int, ...]
    scattered: tuple[tuple[int, int], ...]
    averaged: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduction:
    """What one gradient needs.

    Attributes:
        mesh: of the axes; None for a plain tensor, which is summed over a plain group.
        reduced: the axes that are all-reduced, ascending.
        scattered: the axes that are reduce-scattered, ascending.
        averaged: whether the placements ask for the mean (`Partial("avg")`).
        source: the gradient's placements; empty for a plain tensor.
        placements: of the result; empty for a plain tensor.
        shape: of the local gradient.
        dtype: of the gradient.
        device: of the gradient.
    """

    mesh: DeviceMesh | None
    reduced: tuple[int, ...]
    scattered: tuple[ScatteredAxis, ...]
    averaged: bool
    source: tuple[Placement, ...]
    placements: tuple[Placement, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def pending(self) -> bool:
        """Whether it needs any collective."""
        return self.mesh is None or bool(self.reduced or self.scattered)

    @property
    def spec(self) -> ReductionSpec:
        """The fields that are sent to other ranks."""
        scattered = tuple((one.axis, one.dim) for one in self.scattered)
        return ReductionSpec(self.reduced, scattered, self.averaged, self.dtype)

    def without(self, axes: Collection[str | int]) -> Reduction:
        """Returns the reduction along all axes but these, by name or number, which stay Partial."""
        if self.mesh is None or not axes:
            return self
        deferred = {_axis_number(self.mesh, axis) for axis in axes}
        placements = [
            source if axis in deferred else to
            for axis, (source, to) in enumerate(zip(self.source, self.placements, strict=True))
        ]
        return replace(
            self,
            reduced=tuple(axis for axis in self.reduced if axis not in deferred),
            scattered=tuple(one for one in self.scattered if one.axis not in deferred),
            placements=tuple(placements),
        )

    def __str__(self) -> str:
        """Describes it with the same text on all ranks that need the same."""
        kind = "a plain tensor" if self.mesh is None else f"on a mesh of {tuple(self.mesh.shape)}"
        over = ", ".join(
            [
                *(f"axis {axis} reduced" for axis in self.reduced),
                *(f"axis {one.axis} scattered on dim {one.dim}" for one in self.scattered),
            ]
        )
        mean = " averaged" if self.averaged else ""
        return f"{kind}: {over or 'nothing to do'}{mean}, {self.dtype}, to {self.placements}"


def reduction_of(name: str, param: torch.Tensor, grad: torch.Tensor) -> Reduction:
    """Returns what a gradient needs to get its parameter's placements.

    Args:
        name: of the parameter, for messages.
        param: the parameter.
        grad: its gradient; a DTensor where the parameter is.

    Raises:
        ValueError: they are on different meshes, a placement of the gradient differs from the
            parameter's and is not Partial, is a Partial other than sum or mean, or cannot be
            scattered into the parameter's shards without more communication.
    """
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        if isinstance(param, DTensor) != isinstance(grad, DTensor):
            raise ValueError(
                f"parameter {name!r} is a {type(param).__name__}, its gradient a "
                f"{type(grad).__name__}: expected two DTensors or two plain tensors"
            )
        return Reduction(None, (), (), False, (), (), grad.shape, grad.dtype, grad.device)
    if grad.device_mesh != param.device_mesh:
        raise ValueError(
            f"parameter {name!r} is on {param.device_mesh}, its gradient on {grad.device_mesh}: "
            f"redistribute the gradient to the parameter's mesh first"
        )
    return reduction_to(f"gradient of {name!r}", grad, param.placements)


def reduction_to(what: str, tensor: DTensor, target: Sequence[Placement]) -> Reduction:
    """Returns what a DTensor needs to get other placements by sums alone.

    Args:
        what: begins messages.
        tensor: any.
        target: a placement per axis.

    Raises:
        ValueError: see `reduction_of`.
    """
    mesh = tensor.device_mesh
    placements, reduced, scattered, operations = list(tensor.placements), [], [], set()
    for axis, (source, to) in enumerate(zip(tensor.placements, target, strict=True)):
        if not isinstance(source, Partial):
            if source != to:
                raise ValueError(
                    f"{what}: expected {to} or Partial on axis {axis}, got {source}; only Partial "
                    f"is reduced: redistribute it first"
                )
            continue
        if source == to:
            continue
        operations.add(source.reduce_op)
        placements[axis] = to
        if type(to) is Replicate:
            reduced.append(axis)
        elif (dim := scatter_dim(axis, target, mesh)) is not None:
            scattered.append(ScatteredAxis(axis, dim))
        else:
            raise ValueError(
                f"{what} is Partial on axis {axis}, and the shards of its target {tuple(target)} "
                f"are no chunks of the local sum: redistribute it first"
            )
    if not operations <= {"sum", "avg"} or len(operations) > 1:
        raise ValueError(
            f"{what} is Partial({', '.join(sorted(operations))}): expected Partial(sum) on all "
            f"pending axes, or Partial(avg) on all of them"
        )
    local = tensor._local_tensor
    return Reduction(
        mesh, tuple(reduced), tuple(scattered), operations == {"avg"}, tensor.placements,
        tuple(placements), local.shape, local.dtype, local.device,
    )  # fmt: skip


def reduction_from_spec(param: torch.Tensor, spec: ReductionSpec) -> Reduction:
    """Returns the reduction of a gradient that only other ranks have.

    Args:
        param: the parameter.
        spec: of the gradient's reduction on those ranks.
    """
    if not isinstance(param, DTensor):
        return Reduction(None, (), (), False, (), (), param.shape, spec.dtype, param.device)
    mesh = param.device_mesh
    scattered = tuple(ScatteredAxis(axis, dim) for axis, dim in spec.scattered)
    pending = {*spec.reduced, *(one.axis for one in scattered)}
    operation = Partial("avg") if spec.averaged else Partial()
    summed = [Replicate() if axis in pending else p for axis, p in enumerate(param.placements)]
    source = tuple(operation if axis in pending else p for axis, p in enumerate(param.placements))
    shape, _ = compute_local_shape_and_global_offset(param.shape, mesh, summed)
    return Reduction(
        mesh, spec.reduced, scattered, spec.averaged, source, param.placements, torch.Size(shape),
        spec.dtype, param._local_tensor.device,
    )  # fmt: skip


def _axis_number(mesh: DeviceMesh, axis: str | int) -> int:
    if isinstance(axis, SupportsIndex):
        return operator.index(axis)
    names = mesh.mesh_dim_names or ()
    return names.index(axis) if axis in names else -1  # this mesh has no such axis
