"""What a step has to do for one parameter, and doing it.

Note: a job is local and of fp32. A parameter that is not, or whose blocks are cut, is worked on in
a copy, and put back after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp.optim.adam8bit.blocks import BlockLayout, Placements, block_layout
from fsdp.optim.adam8bit.checking import check_grad
from fsdp.optim.adam8bit.core import update_many
from fsdp.optim.adam8bit.state import moments_of
from fsdp.optim.adam8bit.update import Coefficients, Moments, update
from fsdp.optim.tensors import local_of, placements_of

__all__ = ["Job", "Planned", "make_job", "run"]


@dataclass(eq=False)
class Planned:
    """What was found out about a parameter, and of what.

    Attributes:
        block_size: of its group.
        smallest: of its group: the fewest elements that are quantised.
        placements: of the parameter.
        layout: of its blocks; None if its moments are not quantised.
        first: of the state that `moments` are; None before there is one.
        moments: the local tensors of its state.
    """

    block_size: int
    smallest: int
    placements: Placements
    layout: BlockLayout | None
    first: torch.Tensor | None = None
    moments: Moments | None = None

    @classmethod
    def of(cls, param: torch.Tensor, group: dict[str, Any]) -> Planned:
        """Finds it out."""
        size, smallest = group["block_size"], group["min_8bit_size"]
        quantized = param.numel() >= max(1, smallest)
        layout = block_layout(param, size) if quantized else None
        return cls(size, smallest, placements_of(param), layout)

    def holds(self, param: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether it is still so."""
        return (
            self.block_size == group["block_size"]
            and self.smallest == group["min_8bit_size"]
            and self.placements == placements_of(param)
        )

    def moments_in(self, state: dict[str, Any]) -> Moments:
        """The local tensors of the parameter's state, from which views are taken once."""
        if self.moments is None or self.first is not state["exp_avg"]:
            self.first, self.moments = state["exp_avg"], moments_of(state, self.block_size)
        return self.moments


@dataclass(frozen=True, eq=False)
class Job:
    """A parameter's part of a step.

    Attributes:
        name: tells that of the parameter.
        param: fp32, contiguous: to be updated.
        grad: of the same.
        moments: of them, to be updated.
        coefficients: of the step.
        target: takes what `param` is then; None if that is its own memory.
        moved: the parameter with whole blocks on each rank, on its way to `target`; None if they
            are there anyway.
    """

    name: Callable[[], str]
    param: torch.Tensor
    grad: torch.Tensor
    moments: Moments
    coefficients: Coefficients
    target: torch.Tensor | None
    moved: DTensor | None

    def finish(self) -> None:
        """Puts the result into the parameter, if it is not there."""
        if self.target is None:
            return
        result = local_of(self.target if self.moved is None else self.moved)
        result.copy_(self.param)
        if self.moved is not None:
            back = _redistributed(self.moved, placements_of(self.target))
            local_of(self.target).copy_(back._local_tensor)


def make_job(
    param: torch.Tensor,
    name: Callable[[], str],
    state: dict[str, Any],
    planned: Planned,
    coefficients: Coefficients,
) -> Job:
    """The job of a parameter; communicates only where its blocks are cut.

    Raises:
        ValueError: a gradient that is sparse, or no DTensor where the parameter is one.
    """
    grad = param.grad
    assert grad is not None
    check_grad(param, grad, name)
    moments = planned.moments_in(state)
    layout, moved = planned.layout, None
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        wanted = planned.placements if layout is None else layout.moments
        if wanted != planned.placements:
            moved = _redistributed(param, wanted)
        if grad.placements != wanted:
            grad = _redistributed(grad, wanted)
    held = local_of(param if moved is None else moved)
    work = held.contiguous().float()
    return Job(
        name, work, local_of(grad).contiguous().float(), moments, coefficients,
        None if work is held and moved is None else param, moved,
    )  # fmt: skip


def _redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    return tensor.redistribute(placements=placements)


def run(jobs: Sequence[Job]) -> list[str]:
    """Does them.

    Returns:
        The names of parameters on the CPU with a block that is not finite; others are not asked.
    """
    on_host: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        if job.param.device.type == "cpu":
            key = id(job.coefficients), job.moments.block_size
            on_host.setdefault(key, []).append(job)
        else:
            update(job.param, job.grad, job.moments, job.coefficients)
    lost = []
    for alike in on_host.values():
        found = update_many(
            [job.param for job in alike], [job.grad for job in alike],
            [job.moments for job in alike], alike[0].coefficients,
        )  # fmt: skip
        lost += [alike[i].name() for i in found]
    for job in jobs:
        job.finish()
    return lost
