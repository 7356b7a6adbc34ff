"""What a gradient still needs: along which mesh axes it is summed, and where the sum goes.

Note: a gradient is *pending* along a mesh axis where it is Partial: each rank has a part of the
sum. Its *target* is its parameter's placement there. Where that is Replicate the axis is *reduced*
(an all-reduce), where it is Shard it is *scattered* (a reduce-scatter).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = [
    "Reduction",
    "Scatter",
    "expected",
    "is_local_cut",
    "local_of",
    "reduction_of",
    "reduction_to",
]


@dataclass(frozen=True)
class Scatter:
    """A mesh axis along which the sum is cut, and the tensor dim that is cut into its shards."""

    axis: int
    dim: int


@dataclass(frozen=True)
class Reduction:
    """What one gradient needs.

    Attributes:
        mesh: whose axes these are; None for a plain tensor, which is summed over a plain group.
        reduced: the axes that are all-reduced, ascending.
        scattered: those that are reduce-scattered, ascending.
        averaged: whether the placements ask for the mean (`Partial("avg")`).
        source: the gradient's own placements; empty for a plain tensor.
        placements: those of the result; empty for a plain tensor.
        shape: of the local gradient.
        dtype: of the gradient.
        device: of the gradient.
    """

    mesh: DeviceMesh | None
    reduced: tuple[int, ...]
    scattered: tuple[Scatter, ...]
    averaged: bool
    source: tuple[Placement, ...]
    placements: tuple[Placement, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def pending(self) -> bool:
        """Whether anything is left to do."""
        return self.mesh is None or bool(self.reduced or self.scattered)

    def skipping(self, axes: Collection[str | int]) -> Reduction:
        """The same, but along these axes, by name or number, it stays Partial."""
        if self.mesh is None or not axes:
            return self
        stays = {_axis_number(self.mesh, axis) for axis in axes}
        placements = [
            source if axis in stays else to
            for axis, (source, to) in enumerate(zip(self.source, self.placements, strict=True))
        ]
        return replace(
            self,
            reduced=tuple(axis for axis in self.reduced if axis not in stays),
            scattered=tuple(one for one in self.scattered if one.axis not in stays),
            placements=tuple(placements),
        )

    def __str__(self) -> str:
        """The same on every rank that means the same."""
        kind = "a plain tensor" if self.mesh is None else f"on a mesh of {tuple(self.mesh.shape)}"
        over = ", ".join(
            [
                *(f"axis {axis} reduced" for axis in self.reduced),
                *(f"axis {one.axis} scattered on dim {one.dim}" for one in self.scattered),
            ]
        )
        mean = " averaged" if self.averaged else ""
        return f"{kind}: {over or 'nothing to do'}{mean}, {self.dtype}, to {self.placements}"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, which may be a plain tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def reduction_of(name: str, param: torch.Tensor, grad: torch.Tensor) -> Reduction:
    """What a gradient needs to be placed as its parameter.

    Args:
        name: the parameter's, for messages.
        param: the parameter.
        grad: its gradient; a DTensor where the parameter is.

    Raises:
        ValueError: they are on different meshes, the gradient is placed in another way that is not
            Partial, is a Partial other than sum or mean, or cannot be cut into its shards without
            more communication.
    """
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        if isinstance(param, DTensor) != isinstance(grad, DTensor):
            raise ValueError(
                f"parameter {name!r} is a {type(param).__name__}, its gradient a "
                f"{type(grad).__name__}: both have to be DTensors, or neither"
            )
        return Reduction(None, (), (), False, (), (), grad.shape, grad.dtype, grad.device)
    if grad.device_mesh != param.device_mesh:
        raise ValueError(
            f"parameter {name!r} is on {param.device_mesh}, its gradient on {grad.device_mesh}: "
            f"redistribute the gradient to the parameter's mesh first"
        )
    return reduction_to(f"gradient of {name!r}", grad, param.placements)


def reduction_to(what: str, tensor: DTensor, target: Sequence[Placement]) -> Reduction:
    """What a DTensor needs to be placed in another way by nothing but sums.

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
                    f"{what}: axis {axis} is {source} where {to} is wanted; only Partial is "
                    f"reduced: redistribute it first"
                )
            continue
        if source == to:
            continue
        operations.add(source.reduce_op)
        placements[axis] = to
        if type(to) is Replicate:
            reduced.append(axis)
        elif (dim := _cut_dim(axis, target, mesh)) is not None:
            scattered.append(Scatter(axis, dim))
        else:
            raise ValueError(
                f"{what} is Partial on axis {axis}, to be placed as {tuple(target)}: its own part "
                f"of the sum is no shard of that; redistribute it"
            )
    if not operations <= {"sum", "avg"} or len(operations) > 1:
        raise ValueError(
            f"{what} is Partial({', '.join(sorted(operations))}): only sums and means are "
            f"reduced, one of them at a time"
        )
    local = tensor._local_tensor
    return Reduction(
        mesh, tuple(reduced), tuple(scattered), operations == {"avg"}, tensor.placements,
        tuple(placements), local.shape, local.dtype, local.device,
    )  # fmt: skip


def _cut_dim(axis: int, target: Sequence[Placement], mesh: DeviceMesh) -> int | None:
    """The dim of its own part that a rank has a chunk of, where that is all it takes."""
    to = target[axis]
    if type(to) is Shard:
        return to.dim if is_local_cut(axis, target) else None
    if not isinstance(to, _StridedShard):
        return None
    # Of what the axes on its right have cut, as FSDP2 places parameters beside tensor parallelism.
    right = [
        mesh.size(other) for other in range(axis + 1, len(target)) if target[other] == Shard(to.dim)
    ]
    return to.dim if math.prod(right) == to.split_factor else None


def is_local_cut(
    axis: int,
    placements: Sequence[Placement | None],
    later: Sequence[Placement | None] | None = None,
) -> bool:
    """Whether the shards of an axis are chunks of what its ranks have in common.

    Torch cuts a dim along the axes from left to right, so they are not where an axis further right
    has cut the same dim already.

    Args:
        axis: that is Shard in ``placements``.
        placements: with that Shard.
        later: those on the right of it; by default the same.
    """
    own = placements[axis]
    assert isinstance(own, Shard)
    right = (placements if later is None else later)[axis + 1 :]
    return not any(isinstance(other, Shard) and other.dim == own.dim for other in right)


def expected(
    param: torch.Tensor,
    reduced: tuple[int, ...],
    scattered: tuple[Scatter, ...],
    averaged: bool,
    dtype: torch.dtype,
) -> Reduction:
    """The reduction of a gradient that this rank does not have, as other ranks say it is.

    Args:
        param: the parameter.
        reduced: as in `Reduction`.
        scattered: as in `Reduction`.
        averaged: as in `Reduction`.
        dtype: as in `Reduction`.
    """
    if not isinstance(param, DTensor):
        return Reduction(None, (), (), False, (), (), param.shape, dtype, param.device)
    mesh = param.device_mesh
    pending = {*reduced, *(one.axis for one in scattered)}
    operation = Partial("avg") if averaged else Partial()
    whole = [Replicate() if axis in pending else p for axis, p in enumerate(param.placements)]
    source = tuple(operation if axis in pending else p for axis, p in enumerate(param.placements))
    shape, _ = compute_local_shape_and_global_offset(param.shape, mesh, whole)
    return Reduction(
        mesh, reduced, scattered, averaged, source, param.placements, torch.Size(shape), dtype,
        param._local_tensor.device,
    )  # fmt: skip


def _axis_number(mesh: DeviceMesh, axis: str | int) -> int:
    if isinstance(axis, SupportsIndex):
        return operator.index(axis)
    names = mesh.mesh_dim_names or ()
    return names.index(axis) if axis in names else -1  # this mesh has no such axis
