"""Who iterates on what in a step, planned anew when other parameters have gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp.optim.muon.jobs import Job, jobs_of
from fsdp.optim.muon.matrices import Matrix, matrices_of
from fused_comm.agree import check_agreement

__all__ = ["Work", "plan_work"]


@dataclass(frozen=True, eq=False)
class Work:
    """The matrices of a step.

    Attributes:
        present: for each parameter of the optimizer, whether it has a gradient.
        jobs: the matrices of those that have, in the order of the parameters.
        params: for each job, the number of its parameter among those that have.
        lines: for each axis along which matrices may travel, what its ranks must agree on.
    """

    present: tuple[bool, ...]
    jobs: list[Job]
    params: list[int]
    lines: dict[tuple[DeviceMesh, int], list[str]]

    def param_of(self, job: Job) -> int:
        """The number of the parameter that a matrix is part of, among those with gradients."""
        return self.params[job.number]

    def check_ranks(self) -> None:
        """Compares by hash, in 16 bytes, which parameters have gradients, before they travel.

        Raises:
            ValueError: on every rank, naming the first parameter that has one on some ranks only.
        """
        for (mesh, axis), lines in self.lines.items():
            device = torch.device(mesh.device_type)
            check_agreement("Muon's parameters", lines, mesh.get_group(axis), device)


def plan_work(
    params: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    rows: Mapping[torch.Tensor, tuple[int, ...]],
    last: Work | None,
) -> Work:
    """The matrices of the parameters that have gradients, and their owners.

    Args:
        params: all, in the same order on all ranks.
        names: of the parameters.
        rows: of the matrices of each.
        last: of the step before, which is kept if the same parameters have gradients.

    Raises:
        ValueError: a parameter that is placed as Muon cannot use it, naming it.
    """
    present = tuple(param.grad is not None for param in params)
    if last is not None and last.present == present:
        return last
    matrices: list[Matrix] = []
    numbers: list[int] = []
    lines: dict[tuple[DeviceMesh, int], list[str]] = {}
    count = 0
    for param, has in zip(params, present, strict=True):
        found = matrices_of(param, rows[param], names[param])
        _note(lines, found, names[param], "a gradient" if has else "no gradient")
        if has:
            matrices += found
            numbers += [count] * len(found)
            count += 1
    return Work(present, jobs_of(matrices), numbers, lines)


def _note(
    lines: dict[tuple[DeviceMesh, int], list[str]], found: Sequence[Matrix], name: str, has: str
) -> None:
    """A parameter's line, unless it is whole for ever and never asks for another rank."""
    if not found:
        return
    mesh, axis = found[0].mesh, found[0].axis
    if mesh is None or axis is None or found[0].fixed is not None or mesh.size(axis) == 1:
        return
    held = [matrix.held for matrix in found]
    lines.setdefault((mesh, axis), []).append(f"{name} of {held} elements by rank: {has}")
