"""Assigns matrices to the ranks that own them; all ranks compute the same without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.matrix.matrices import Matrix
from fused_comm.agreement import check_agreement
from ragged_shard import RaggedShard, dim_of

__all__ = [
    "CostFunction", "MatrixLoad", "MatrixTask", "OwnerPlan", "OwnerPlanner", "Owners",
    "assign_owners", "choose_owners",
]  # fmt: skip

CostFunction: TypeAlias = Callable[[tuple[int, int]], int]
Owners: TypeAlias = Literal["per_step", "persistent"]


@dataclass(frozen=True, eq=False)
class MatrixTask:
    """A matrix and its owner.

    Attributes:
        index: index of the matrix in the plan.
        matrix: the matrix that the owner computes on.
        owner: rank of the shard axis; None if every rank has the whole matrix and computes on it.
        cost: multiplications in a step, as the optimizer counts them.
    """

    index: int
    matrix: Matrix
    owner: int | None
    cost: int

    @cached_property
    def is_mine(self) -> bool:
        """Whether this rank computes on the matrix."""
        mesh, axis = self.matrix.mesh, self.matrix.axis
        return mesh is None or axis is None or mesh.get_local_rank(axis) == self.owner

    @cached_property
    def needs_exchange(self) -> bool:
        """Whether a rank other than the owner has elements of the matrix."""
        elements = self.matrix.elements_by_rank
        return self.owner is not None and elements[self.owner] < sum(elements)

    @cached_property
    def sharded_placements(self) -> tuple[Placement, ...]:
        """The base, as a tensor of its own, sharded over the shard axis as the parameter is."""
        return self._on_shard_axis(RaggedShard((0, 1), self.matrix.elements_by_rank))

    @cached_property
    def owned_placements(self) -> tuple[Placement, ...]:
        """The base, as a tensor of its own, on its owner."""
        assert self.owner is not None
        ranks = len(self.matrix.elements_by_rank)
        return self._on_shard_axis(RaggedShard.owned_by(self.owner, ranks))

    @cached_property
    def inner_mesh(self) -> DeviceMesh:
        """The submesh of the inner axes, over which the matrix is sharded to the base."""
        mesh, axes = self.matrix.mesh, self._inner_axes
        assert mesh is not None
        if len(axes) == mesh.ndim:
            return mesh
        return mesh[tuple((mesh.mesh_dim_names or ())[axis] for axis in axes)]

    @cached_property
    def inner_placements(self) -> tuple[Placement, ...]:
        """Placements of the matrix on `inner_mesh`."""
        return tuple(self.matrix.placements[axis] for axis in self._inner_axes)

    def base_dtensor(self, local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        """Returns the base as a DTensor on the parameter's mesh with this local tensor."""
        return _dtensor(local, self.matrix.base_shape, self.matrix.mesh, placements)

    def inner_dtensor(self, local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        """Returns the matrix as a DTensor on `inner_mesh` with this local tensor."""
        return _dtensor(local, self.matrix.shape, self.inner_mesh, placements)

    @property
    def _inner_axes(self) -> list[int]:
        return [
            axis for axis, placement in enumerate(self.matrix.placements)
            if dim_of(placement) is not None
        ]  # fmt: skip

    def _on_shard_axis(self, placement: Placement) -> tuple[Placement, ...]:
        axes = range(len(self.matrix.placements))
        return tuple(placement if axis == self.matrix.axis else Replicate() for axis in axes)


def _dtensor(
    local: torch.Tensor,
    shape: tuple[int, int],
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
) -> DTensor:
    assert mesh is not None
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


@dataclass(frozen=True)
class MatrixLoad:
    """What the choice of a matrix's owner depends on.

    Attributes:
        cost: multiplications in a step.
        elements_by_rank: elements on each rank of the shard axis.
        fixed_owner: the owner, if the placement determines it (`Whole()`).
    """

    cost: int
    elements_by_rank: tuple[int, ...]
    fixed_owner: int | None = None


@dataclass(frozen=True, eq=False)
class OwnerPlan:
    """The matrices of a step and their owners.

    Attributes:
        has_grad: for each parameter of the optimizer, whether it has a gradient.
        all_tasks: matrices with owners, in the order of the parameters.
        param_indices: for each of these, the index of its parameter.
        agreement_lines: for each axis over which matrices may be exchanged, one line of text per
            parameter that must be the same on all ranks of the axis.
        owners: of the planner.
    """

    has_grad: tuple[bool, ...]
    all_tasks: list[MatrixTask]
    param_indices: list[int]
    agreement_lines: dict[tuple[DeviceMesh, int], list[str]]
    owners: Owners

    @property
    def tasks(self) -> list[MatrixTask]:
        """The matrices of parameters that have gradients."""
        return [task for task in self.all_tasks if self.has_grad[self.param_index(task)]]

    def param_index(self, task: MatrixTask) -> int:
        """Returns the index of the parameter that a matrix is part of."""
        return self.param_indices[task.index]

    def tasks_by_param(self) -> dict[int, list[MatrixTask]]:
        """Returns the matrices of each parameter that has matrices, by the parameter's index."""
        tasks: dict[int, list[MatrixTask]] = {}
        for task in self.all_tasks:
            tasks.setdefault(self.param_index(task), []).append(task)
        return tasks

    def check_ranks_agree(self, optimizer_name: str) -> None:
        """Checks that ranks have gradients of the same parameters, by comparing 16-byte hashes.

        Raises:
            ValueError: on every rank; it names the first parameter on which ranks differ.
        """
        for (mesh, axis), lines in self.agreement_lines.items():
            device = torch.device(mesh.device_type)
            check_agreement(f"{optimizer_name}'s parameters", lines, mesh.get_group(axis), device)


@dataclass(frozen=True)
class OwnerPlanner:
    """Plans which rank owns each matrix of an optimizer.

    Attributes:
        matrices_of: returns the matrices of a parameter, the same on all ranks.
        cost_of: returns the multiplications of a step by a matrix's shape.
        owners: "per_step" balances the cost of the matrices that have gradients in a step;
            "persistent" never changes an owner, for optimizers whose state is placed on it.
    """

    matrices_of: Callable[[torch.Tensor], list[Matrix]]
    cost_of: CostFunction
    owners: Owners

    def plan(
        self, params: Sequence[torch.Tensor], names: Sequence[str], last: OwnerPlan | None
    ) -> OwnerPlan:
        """Returns the matrices of all parameters and their owners.

        Args:
            params: all parameters, in the same order on all ranks; those of `last` come first.
            names: names of the parameters.
            last: plan of the step before, which is returned if the same parameters have gradients.
                That of a planner with other `owners` is not used.

        Raises:
            ValueError: the placements of a parameter are not supported; it names the parameter.
        """
        has_grad = tuple(param.grad is not None for param in params)
        if last is not None and last.owners != self.owners:
            last = None
        if last is not None and last.has_grad == has_grad:
            return last
        matrices: list[Matrix] = []
        param_indices: list[int] = []
        lines: dict[tuple[DeviceMesh, int], list[str]] = {}
        persistent = self.owners == "persistent"
        for index, (param, has) in enumerate(zip(params, has_grad, strict=True)):
            found = self.matrices_of(param)
            _add_agreement_line(lines, found, names[index], "a gradient" if has else "no gradient")
            if has or persistent:
                matrices += found
                param_indices += [index] * len(found)
        previous = (
            [task.owner for task in last.all_tasks] if persistent and last is not None else []
        )
        tasks = assign_owners(matrices, self.cost_of, previous)
        return OwnerPlan(has_grad, tasks, param_indices, lines, self.owners)


def assign_owners(
    matrices: Sequence[Matrix], cost_of: CostFunction, previous: Sequence[int | None] = ()
) -> list[MatrixTask]:
    """Assigns owners to matrices, separately for those of each mesh axis.

    Args:
        matrices: in the same order on all ranks.
        cost_of: returns the multiplications of a step by a matrix's shape.
        previous: owners of the first matrices, which do not change.
    """
    costs = [cost_of(matrix.shape) for matrix in matrices]
    fixed = [*previous, *(matrix.fixed_owner for matrix in matrices[len(previous) :])]
    owners: dict[int, int] = {}
    axes: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.mesh is not None and matrix.axis is not None:
            axes.setdefault((matrix.mesh, matrix.axis), []).append(index)
    for (mesh, axis), indices in axes.items():
        busy = [0] * mesh.size(axis)
        # Ranks of inner axes exchange a matrix that these shard, so it has one owner for all of
        # them. Their other matrices may differ in number, and are chosen for behind it.
        for is_exchanged in (True, False):
            chosen = [n for n in indices if matrices[n].is_inner_sharded is is_exchanged]
            loads = [MatrixLoad(costs[n], matrices[n].elements_of_all, fixed[n]) for n in chosen]
            for n, owner in zip(chosen, choose_owners(loads, busy), strict=True):
                owners[n] = owner
                busy[owner] += costs[n]
    return [
        MatrixTask(index, matrix, owners.get(index), costs[index])
        for index, matrix in enumerate(matrices)
    ]


def choose_owners(loads: Sequence[MatrixLoad], busy: Sequence[int]) -> list[int]:
    """Chooses an owner for each matrix, in the order of decreasing cost.

    The owner is the rank with most elements of the matrix among those whose total cost stays within
    an equal share, and the least busy rank if there are none.

    Args:
        loads: of the matrices, in the same order on all ranks.
        busy: the cost that each rank of the axis has already.
    """
    owners = [0 if load.fixed_owner is None else load.fixed_owner for load in loads]
    busy = [*busy]
    for load in loads:
        if load.fixed_owner is not None:
            busy[load.fixed_owner] += load.cost
    free = [index for index, load in enumerate(loads) if load.fixed_owner is None]
    share = (sum(busy) + sum(loads[index].cost for index in free)) / len(busy)
    for index in sorted(free, key=lambda index: -loads[index].cost):
        load = loads[index]
        least = min(busy)
        candidates = [
            rank for rank, cost in enumerate(busy) if cost + load.cost <= share or cost == least
        ]
        owner = max(candidates, key=lambda rank: (load.elements_by_rank[rank], -busy[rank], -rank))
        owners[index] = owner
        busy[owner] += load.cost
    return owners


def _add_agreement_line(
    lines: dict[tuple[DeviceMesh, int], list[str]], found: Sequence[Matrix], name: str, has: str
) -> None:
    """Adds a parameter's line, unless its matrices are never exchanged."""
    if not found:
        return
    mesh, axis = found[0].mesh, found[0].axis
    if mesh is None or axis is None or found[0].fixed_owner is not None or mesh.size(axis) == 1:
        return
    elements = [matrix.elements_by_rank for matrix in found]
    lines.setdefault((mesh, axis), []).append(f"{name} of {elements} elements by rank: {has}")
