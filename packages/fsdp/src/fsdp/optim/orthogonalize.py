"""Matrices on their way to their owners and back, the next ones while the present ones iterate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.matrices import Matrix
from fsdp.optim.owners import Load, choose_owners, work_of
from fused_comm import Pending, redistribute_many
from ragged_shard import RaggedShard

__all__ = ["Job", "jobs_of", "orthogonalize"]

Iterate = Callable[["Job", torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Job:
    """A matrix and its owner.

    Attributes:
        number: among the matrices.
        matrix: that is iterated on.
        owner: rank of the cut axis; None where every rank has it whole, and iterates.
    """

    number: int
    matrix: Matrix
    owner: int | None

    @cached_property
    def is_mine(self) -> bool:
        """Whether this rank iterates."""
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


def jobs_of(matrices: Sequence[Matrix]) -> list[Job]:
    """Owners for matrices: for those on each axis of a mesh apart.

    Args:
        matrices: in the same order on all ranks.
    """
    owners: dict[int, int] = {}
    axes: dict[tuple[DeviceMesh, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if matrix.mesh is not None and matrix.axis is not None:
            axes.setdefault((matrix.mesh, matrix.axis), []).append(number)
    for (mesh, axis), numbers in axes.items():
        loads = [
            Load(work_of(matrices[n].shape), matrices[n].held, matrices[n].fixed) for n in numbers
        ]
        owners.update(zip(numbers, choose_owners(loads, mesh.size(axis)), strict=True))
    return [Job(number, matrix, owners.get(number)) for number, matrix in enumerate(matrices)]


def orthogonalize(
    jobs: Sequence[Job],
    direction: Callable[[Job], torch.Tensor],
    iterate: Iterate,
    apply: Callable[[Job, torch.Tensor], None],
    bucket_bytes: int,
) -> None:
    """Brings each matrix together on its owner, iterates there, and gives the result back.

    A bucket is gathered in one collective and given back in another. While owners iterate, the
    next bucket comes and the one before goes back; what travels nowhere comes first.

    Args:
        jobs: alike on all ranks.
        direction: this rank's part of a matrix, flat, of the dtype that travels.
        iterate: the matrix to the same shape.
        apply: takes this rank's part of the result, flat.
        bucket_bytes: of the matrices that travel at the same time, about.
    """
    buckets = _buckets([job for job in jobs if job.travels], bucket_bytes)
    coming = _Gather(buckets[0], direction) if buckets else None
    home = [job for job in jobs if not job.travels and job.is_mine]
    given = [direction(job).view(job.matrix.base) for job in home]
    for job, result in zip(home, _iterated(home, given, iterate), strict=True):
        apply(job, result.reshape(-1))
    del given
    going: _Return | None = None
    for number in range(len(buckets)):
        assert coming is not None
        present = coming
        coming = _Gather(buckets[number + 1], direction) if number + 1 < len(buckets) else None
        before, going = going, present.iterate(iterate)
        if before is not None:
            before.land(apply)
    if going is not None:
        going.land(apply)


class _Gather:
    """A bucket on its way to the owners."""

    def __init__(self, jobs: Sequence[Job], direction: Callable[[Job], torch.Tensor]) -> None:
        self._jobs = jobs
        parts = [job.dtensor(direction(job), job.matrix.mesh, job.cut) for job in jobs]
        self._pending = redistribute_many(parts, [job.owned for job in jobs], async_op=True)

    def iterate(self, iterate: Iterate) -> _Return:
        """Waits for it, iterates on what is ours, and starts the way back."""
        locals_ = [owned._local_tensor for owned in self._pending.wait()]
        mine = [number for number, job in enumerate(self._jobs) if job.is_mine]
        results = _iterated(
            [self._jobs[number] for number in mine], [locals_[number] for number in mine], iterate
        )
        for number, result in zip(mine, results, strict=True):
            locals_[number] = result
        return _Return(self._jobs, locals_)


class _Return:
    """A bucket on its way back."""

    def __init__(self, jobs: Sequence[Job], locals_: Sequence[torch.Tensor]) -> None:
        self._jobs = jobs
        owned = [
            job.dtensor(local, job.matrix.mesh, job.owned)
            for job, local in zip(jobs, locals_, strict=True)
        ]
        self._pending: Pending = redistribute_many(owned, [job.cut for job in jobs], async_op=True)

    def land(self, apply: Callable[[Job, torch.Tensor], None]) -> None:
        """Waits for it."""
        for job, part in zip(self._jobs, self._pending.wait(), strict=True):
            apply(job, part._local_tensor)


def _iterated(
    jobs: Sequence[Job], bases: Sequence[torch.Tensor], iterate: Iterate
) -> list[torch.Tensor]:
    """Iterates on bases that are on this rank, gathering first what inner axes have cut."""
    whole = list(bases)
    inner = [number for number, job in enumerate(jobs) if job.matrix.inner]
    if inner:
        gathered = redistribute_many(
            [jobs[n].dtensor(bases[n], jobs[n].inner_mesh, jobs[n].inner) for n in inner],
            [[Replicate()] * len(jobs[n].inner) for n in inner],
        )
        for number, one in zip(inner, gathered, strict=True):
            whole[number] = one._local_tensor
    results = []
    for job, matrix in zip(jobs, whole, strict=True):
        result = iterate(job, matrix)
        if job.matrix.inner:
            everywhere = [Replicate()] * len(job.inner)
            cut = job.dtensor(result.contiguous(), job.inner_mesh, everywhere)
            result = cut.redistribute(placements=job.inner).to_local()
        results.append(result)
    return results


def _buckets(jobs: Sequence[Job], limit: int) -> list[list[Job]]:
    """Owners take turns, each with its largest first, so that all have work in every bucket."""
    turns: Counter[int | None] = Counter()
    ordered = []
    for job in sorted(jobs, key=lambda job: (-work_of(job.matrix.shape), job.number)):
        ordered.append((turns[job.owner], job.number, job))
        turns[job.owner] += 1
    buckets: list[list[Job]] = []
    room = 0
    for _, _, job in sorted(ordered, key=lambda one: one[:2]):
        size = math.prod(job.matrix.base) * torch.bfloat16.itemsize
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(job)
        room -= size
    return buckets
