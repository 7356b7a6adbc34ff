"""Matrices on their way to their owners and back, the next ones while owners compute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import Replicate

from fsdp.optim.owned.jobs import Job
from fused_comm import Pending, redistribute_many

__all__ = ["visit_owners"]

Compute = Callable[[Job, torch.Tensor], torch.Tensor]


def visit_owners(
    jobs: Sequence[Job],
    give: Callable[[Job], torch.Tensor],
    compute: Compute,
    apply: Callable[[Job, torch.Tensor], None],
    bucket_elements: int,
) -> None:
    """Brings each matrix together on its owner, computes there, and gives the result back.

    A bucket is gathered in one collective and given back in another. While owners compute, the
    next bucket comes and the one before goes back; what travels nowhere comes first.

    Args:
        jobs: alike on all ranks.
        give: this rank's part of a matrix, flat, of the dtype that travels.
        compute: the matrix to a result of the same shape; on its owner only.
        apply: takes this rank's part of the result, flat.
        bucket_elements: of the matrices that travel at the same time, about.
    """
    buckets = _buckets([job for job in jobs if job.travels], bucket_elements)
    coming = _Gather(buckets[0], give) if buckets else None
    home = [job for job in jobs if not job.travels and job.is_mine]
    given = [give(job).view(job.matrix.base) for job in home]
    for job, result in zip(home, _computed(home, given, compute), strict=True):
        apply(job, result.reshape(-1))
    del given
    going: _Return | None = None
    for number in range(len(buckets)):
        assert coming is not None
        present = coming
        coming = _Gather(buckets[number + 1], give) if number + 1 < len(buckets) else None
        before, going = going, present.compute(compute)
        if before is not None:
            before.land(apply)
    if going is not None:
        going.land(apply)


class _Gather:
    """A bucket on its way to the owners."""

    def __init__(self, jobs: Sequence[Job], give: Callable[[Job], torch.Tensor]) -> None:
        self._jobs = jobs
        parts = [job.dtensor(give(job), job.matrix.mesh, job.cut) for job in jobs]
        self._pending = redistribute_many(parts, [job.owned for job in jobs], async_op=True)

    def compute(self, compute: Compute) -> _Return:
        """Waits for it, computes on what is ours, and starts the way back."""
        locals_ = [owned._local_tensor for owned in self._pending.wait()]
        mine = [number for number, job in enumerate(self._jobs) if job.is_mine]
        results = _computed(
            [self._jobs[number] for number in mine], [locals_[number] for number in mine], compute
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


def _computed(
    jobs: Sequence[Job], bases: Sequence[torch.Tensor], compute: Compute
) -> list[torch.Tensor]:
    """Computes on bases that are on this rank, gathering first what inner axes have cut."""
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
        result = compute(job, matrix)
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
    for job in sorted(jobs, key=lambda job: (-job.work, job.number)):
        ordered.append((turns[job.owner], job.number, job))
        turns[job.owner] += 1
    buckets: list[list[Job]] = []
    room = 0
    for _, _, job in sorted(ordered, key=lambda one: one[:2]):
        size = math.prod(job.matrix.base)
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(job)
        room -= size
    return buckets
