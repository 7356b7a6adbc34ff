"""Who computes on what in a step, planned anew when other parameters have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp.optim.owned.jobs import Job, WorkOf, jobs_of
from fsdp.optim.owned.matrices import Matrix
from fused_comm.agree import check_agreement

__all__ = ["Planner", "Work"]


@dataclass(frozen=True, eq=False)
class Work:
    """The matrices of a step.

    Attributes:
        present: for each parameter of the optimizer, whether it has a gradient.
        planned: matrices with owners, in the order of the parameters.
        params: for each of them, the number of its parameter among all.
        lines: for each axis along which matrices may travel, what its ranks must agree on.
    """

    present: tuple[bool, ...]
    planned: list[Job]
    params: list[int]
    lines: dict[tuple[DeviceMesh, int], list[str]]

    @property
    def jobs(self) -> list[Job]:
        """Those of parameters that have gradients."""
        return [job for job in self.planned if self.present[self.param_of(job)]]

    def param_of(self, job: Job) -> int:
        """The number of the parameter that a matrix is part of."""
        return self.params[job.number]

    def check_ranks(self, who: str) -> None:
        """Compares by hash, in 16 bytes, which parameters have gradients, before they travel.

        Raises:
            ValueError: on every rank, naming the first parameter that has one on some ranks only.
        """
        for (mesh, axis), lines in self.lines.items():
            device = torch.device(mesh.device_type)
            check_agreement(f"{who}'s parameters", lines, mesh.get_group(axis), device)


@dataclass(frozen=True)
class Planner:
    """How an optimizer gives its matrices owners.

    Attributes:
        matrices_of: a parameter, in the same way on all ranks.
        work_of: multiplications of a step, by a matrix's shape.
        owners: "of a step" share the work of the matrices that have gradients; "for good" ones
            keep their matrices, as they must where state lies with them.
    """

    matrices_of: Callable[[torch.Tensor], list[Matrix]]
    work_of: WorkOf
    owners: Literal["of a step", "for good"]

    def plan(self, params: Sequence[torch.Tensor], names: Sequence[str], last: Work | None) -> Work:
        """The matrices of parameters, and their owners.

        Args:
            params: all, in the same order on all ranks; those that `last` knew come first.
            names: of the parameters.
            last: of the step before, which is kept if the same parameters have gradients.

        Raises:
            ValueError: a parameter that is placed as the optimizer cannot use it, naming it.
        """
        present = tuple(param.grad is not None for param in params)
        if last is not None and last.present == present:
            return last
        matrices: list[Matrix] = []
        numbers: list[int] = []
        lines: dict[tuple[DeviceMesh, int], list[str]] = {}
        stay = self.owners == "for good"
        for number, (param, has) in enumerate(zip(params, present, strict=True)):
            found = self.matrices_of(param)
            _note(lines, found, names[number], "a gradient" if has else "no gradient")
            if has or stay:
                matrices += found
                numbers += [number] * len(found)
        settled = [job.owner for job in last.planned] if stay and last is not None else []
        return Work(present, jobs_of(matrices, self.work_of, settled), numbers, lines)


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
