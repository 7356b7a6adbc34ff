"""What is done with one tensor at a site: a local one becomes a DTensor, a DTensor is moved."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.fuse import Move, Step
from plan_api.lowering.ir import Act, short
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.spec.axes import axis_names

__all__ = ["Mover"]


class Mover:
    """Moves tensors as one step says; called with each tensor that passes.

    Args:
        step: of a site.
        mesh: the plan's.
        site: for messages.
    """

    def __init__(self, step: Step, mesh: DeviceMesh, site: str) -> None:
        axes = axis_names(mesh)
        self._step = step
        self._mesh = mesh
        self._what = f"{site}:{step.tensor}:{step.index}"
        self._in_backward = StepContext(f"the backward of {site}", step)
        self._annotates = step.act is Act.ANNOTATE
        self._moves = {axes.index(axis): move for axis, move in step.moves.items()}
        # Of a plain tensor: the same on all ranks of an axis, if nothing else is said.
        self._plain = tuple(
            _of_plain(self._moves.get(axis), self._annotates) for axis in range(len(axes))
        )
        self._back = any(move.grad_dst is not None for move in self._moves.values())
        self._targets: dict[tuple[Placement, ...], tuple[Placement, ...]] = {}
        self.settled: DTensorSpec | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it should be; itself if it is that.

        Raises:
            ValueError: it is on another mesh, or not what the plan says it is.
        """
        if not isinstance(tensor, DTensor):
            with moving(self._step, self._plain, self._plain):
                tensor = DTensor.from_local(tensor, self._mesh, self._plain, run_check=False)
        spec = tensor._spec
        target = self._targets.get(spec.placements)
        if target is None or spec.mesh is not self._mesh:
            target = self._target(tensor)
        if not self._back and (target is spec.placements or target == spec.placements):
            self.settled = spec
            return tensor
        with moving(self._step, spec.placements, target):
            if self._back or any(map(_is_masked, spec.placements)):
                back = self._grad_dst(spec.placements)
                return _MoveBack.apply(tensor, target, back, self._in_backward)  # type: ignore[no-any-return, no-untyped-call]
            return tensor.redistribute(placements=target)

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return f"plan-api: {self._what}, {self._step.said}"

    def _target(self, tensor: DTensor) -> tuple[Placement, ...]:
        if tensor.device_mesh != self._mesh:
            raise ValueError(
                f"{self._what} is on {tensor.device_mesh}, the plan's mesh is {self._mesh}"
            )
        target = list(tensor.placements)
        for axis, move in self._moves.items():
            said = move.dst if self._annotates else move.src
            if said is not None and not _is(target[axis], said):
                raise ValueError(
                    f"{self._what} is {short(target[axis])} along "
                    f"{axis_names(self._mesh)[axis]!r}, and the plan says {short(said)}"
                )
            target[axis] = move.dst
        return self._targets.setdefault(tensor.placements, tuple(target))

    def _grad_dst(self, placements: tuple[Placement, ...]) -> tuple[Placement | None, ...]:
        """How the gradient goes back along each axis; None: as `_gradient_of_sum` says."""
        wanted = [None if isinstance(one, Partial) else one for one in placements]
        for axis, move in self._moves.items():
            if move.grad_dst is not None:
                wanted[axis] = move.grad_dst
        return tuple(wanted)


def _is(placement: Placement, said: Placement) -> bool:
    """Of sums, whatever they are of: those of an embedding are of a kind of their own."""
    if isinstance(placement, Partial) and isinstance(said, Partial):
        return placement.reduce_op == said.reduce_op
    return placement == said


def _of_plain(move: Move | None, annotates: bool) -> Placement:
    if move is None:
        return Replicate()
    return (move.dst if annotates else move.src) or Replicate()


def _is_masked(placement: Placement) -> bool:
    """Whether it is the sum of an embedding whose rows are cut: a kind of its own in torch."""
    return isinstance(placement, Partial) and type(placement) is not Partial


def _gradient_of_sum(now: Placement) -> Placement:
    """A sum as it comes, anything else whole: torch makes no sum of what is whole."""
    return now if isinstance(now, Partial) else Replicate()


class _MoveBack(torch.autograd.Function):
    """A redistribution whose gradient comes back in placements of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: tuple[Placement, ...],
        back: tuple[Placement | None, ...],
        at: StepContext,
    ) -> torch.Tensor:
        ctx.back, ctx.at = back, at
        moved = tensor.redistribute(placements=target)
        return tensor.view_as(tensor) if moved is tensor else moved  # which may not be an argument

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        back = [
            _gradient_of_sum(now) if wanted is None else wanted
            for wanted, now in zip(ctx.back, grad.placements, strict=True)
        ]
        return grad.redistribute(placements=back), None, None, None
