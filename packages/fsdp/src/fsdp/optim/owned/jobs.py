"""Matrices with their owners, and how a matrix is placed on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.owned.matrices import Matrix
from fsdp.optim.owned.owners import Load, choose_owners
from ragged_shard import RaggedShard

__all__ = ["Job", "WorkOf", "jobs_of"]

WorkOf: TypeAlias = Callable[[tuple[int, int]], int]


@dataclass(frozen=True, eq=False)
class Job:
    """A matrix and its owner.

    Attributes:
        number: among the matrices.
        matrix: that is computed on.
        owner: rank of the cut axis; None where every rank has it whole, and computes.
        work: of a step, as the optimizer counts it.
    """

    number: int
    matrix: Matrix
    owner: int | None
    work: int

    @cached_property
    def is_mine(self) -> bool:
        """Whether this rank computes on it."""
        mesh, axis = self.matrix.mesh, self.matrix.axis
        return mesh is None or axis is None or mesh.get_local_rank(axis) == self.owner

    @cached_property
    def travels(self) -> bool:
        """Whether any part of the matrix is on another rank than its owner."""
        return self.owner is not None and self.matrix.held[self.owner] < sum(self.matrix.held)

    @cached_property
    def cut(self) -> tuple[Placement, ...]:
        """The base on the ranks of the cut axis, as the parameter lies."""
        return self._along_axis(RaggedShard((0, 1), self.matrix.held))

    @cached_property
    def owned(self) -> tuple[Placement, ...]:
        """The base on its owner."""
        assert self.owner is not None
        return self._along_axis(RaggedShard.owned_by(self.owner, len(self.matrix.held)))

    @cached_property
    def inner_mesh(self) -> DeviceMesh:
        """Of the axes that cut the base off the matrix."""
        mesh, names = self.matrix.mesh, []
        assert mesh is not None
        axes = [
            axis for axis, one in enumerate(self.matrix.placements)
            if isinstance(one, Shard) and axis != self.matrix.axis
        ]  # fmt: skip
        if len(axes) == mesh.ndim:
            return mesh
        names = [(mesh.mesh_dim_names or ())[axis] for axis in axes]
        return mesh[tuple(names)]

    @cached_property
    def inner(self) -> tuple[Placement, ...]:
        """The matrix on the inner mesh."""
        return tuple(
            one for axis, one in enumerate(self.matrix.placements)
            if isinstance(one, Shard) and axis != self.matrix.axis
        )  # fmt: skip

    def dtensor(
        self, local: torch.Tensor, mesh: DeviceMesh | None, at: Sequence[Placement]
    ) -> DTensor:
        """A DTensor of the matrix's shape around what this rank has of it."""
        assert mesh is not None
        rows, columns = self.matrix.shape
        meta = TensorMeta(torch.Size((rows, columns)), (columns, 1), local.dtype)
        return DTensor(local, DTensorSpec(mesh, tuple(at), tensor_meta=meta), requires_grad=False)

    def _along_axis(self, placement: Placement) -> tuple[Placement, ...]:
        axis, others = self.matrix.axis, self.matrix.placements
        return tuple(placement if at == axis else one for at, one in enumerate(others))


def jobs_of(
    matrices: Sequence[Matrix], work_of: WorkOf, settled: Sequence[int | None] = ()
) -> list[Job]:
    """Owners for matrices: for those on each axis of a mesh apart.

    Args:
        matrices: in the same order on all ranks.
        work_of: multiplications of a step, by a matrix's shape.
        settled: the owners of the first ones, which have them already.
    """
    work = [work_of(matrix.shape) for matrix in matrices]
    fixed = [*settled, *(matrix.fixed for matrix in matrices[len(settled) :])]
    owners: dict[int, int] = {}
    axes: dict[tuple[DeviceMesh, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if matrix.mesh is not None and matrix.axis is not None:
            axes.setdefault((matrix.mesh, matrix.axis), []).append(number)
    for (mesh, axis), numbers in axes.items():
        loads = [Load(work[n], matrices[n].held, fixed[n]) for n in numbers]
        owners.update(zip(numbers, choose_owners(loads, mesh.size(axis)), strict=True))
    return [
        Job(number, matrix, owners.get(number), work[number])
        for number, matrix in enumerate(matrices)
    ]
