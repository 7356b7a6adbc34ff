"""What is done with one local tensor at a site: moved forward, and its gradient on the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import AxisMove, SiteStep
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.local_redistribute import LocalRedistribution, local_redistribution
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement
from plan_api.static.passed import Passed

__all__ = ["StaticMover"]

_Along = tuple[int, Placement, Placement]  # an axis, before and after


class StaticMover:
    """Moves local tensors as one step says; called with each tensor that passes.

    Args:
        step: of a site; its moves say what tensors are before.
        mesh: the plan's.
        site: for messages.
        whole: whether what is not said to be anything before is whole, as what the script gives.
        passed: is told of each tensor; None: nobody is.

    Raises:
        ValueError: the step does not say what a tensor, or its gradient, is before.
    """

    settled: DTensorSpec | None = None  # as `Mover` has it; here nothing is a DTensor

    def __init__(
        self,
        step: SiteStep,
        mesh: DeviceMesh,
        site: str,
        whole: bool = False,
        passed: Passed | None = None,
    ) -> None:
        self._passed = passed
        self.what = f"{site}:{step.tensor}:{step.index}"
        self._step = step
        self.in_backward = StepContext(f"the backward of {site}", step)
        axes = axis_names(mesh)
        there: list[_Along] = []
        back: list[_Along] = []
        shares = 1
        for name, move in step.moves.items():
            axis = axes.index(name)
            src = self._src(name, move, whole)
            there.append((axis, src, move.dst))
            back.append((axis, *self._gradient(name, move, src)))
            if isinstance(src, Partial) and src.reduce_op == "avg" and src != move.dst:
                shares *= mesh.size(axis)
        self._before = tuple(src for _, src, _ in there)
        self._after = tuple(dst for _, _, dst in there)
        self._there = _moves(there, mesh, self.what)
        self._back = _moves(back, mesh, f"the gradient of {self.what}")
        if shares > 1:
            self._back.append(lambda grad: grad / shares)

    @property
    def idle(self) -> bool:
        """Whether it moves nothing, in neither direction."""
        return not self._there and not self._back

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it should be.

        Raises:
            ValueError: it is a DTensor, or cannot be cut evenly.
        """
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{self.what} is a DTensor, {tensor._spec}: in static mode modules run on local "
                f"tensors; give to_local() of it, placed as the plan says, or use mode='eager'"
            )
        if self._passed is not None:
            self._passed.add(self.what)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Moved.apply(tensor, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.forward(tensor)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without autograd."""
        return self._moved(tensor, self._there, self._before, self._after)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of what was moved, moved back."""
        return self._moved(grad, self._back, self._after, self._before)

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return f"plan-api: {self.what}, {self._step.description}"

    def _moved(
        self,
        tensor: torch.Tensor,
        moves: Sequence[LocalRedistribution],
        before: tuple[Placement, ...],
        after: tuple[Placement, ...],
    ) -> torch.Tensor:
        if moves:
            with moving(self._step, before, after):
                for move in moves:
                    tensor = move(tensor)
        return tensor

    def _src(self, axis: str, move: AxisMove, whole: bool) -> Placement:
        if move.src is not None:
            return move.src
        if whole:
            return Replicate()
        raise ValueError(
            f"{self.what}, to be {format_placement(move.dst)} along {axis!r}: static mode has to "
            f"know what it is before: say redistribute(path, src, dst), or have "
            f"generate_static() find out"
        )

    def _gradient(self, axis: str, move: AxisMove, src: Placement) -> tuple[Placement, Placement]:
        """What the gradient along an axis is, and what it becomes."""
        if move.grad_src is None and move.grad_dst is None and src == move.dst:
            return Replicate(), Replicate()
        found = move.grad_src
        if found is None and type(move.dst) is Shard:
            found = move.dst
        if found is None and (not isinstance(src, Shard) or isinstance(move.dst, Partial)):
            found = Replicate()
        if found is None or (move.grad_dst is not None and move.grad_src is None):
            raise ValueError(
                f"{self.what}, {format_placement(src)} to {format_placement(move.dst)} along "
                f"{axis!r}: static mode has to know what its gradient is before: Partial() "
                f"where the ranks go on with different parts of the work, "
                f"Replicate() where all do the same; say grad_src="
            )
        if move.grad_dst is not None:
            return found, move.grad_dst
        return found, src if type(src) is Shard else Replicate()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mover: StaticMover) -> torch.Tensor:
        ctx.mover = mover
        moved = mover.forward(tensor)
        return tensor.view_as(tensor) if moved is tensor else moved  # which may not be an argument

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        mover: StaticMover = ctx.mover
        try:
            return mover.backward(grads[0]), None
        except Exception as error:
            mover.in_backward.add_to(error, grads)
            raise


def _moves(along: Iterable[_Along], mesh: DeviceMesh, what: str) -> list[LocalRedistribution]:
    """First what is gathered or summed, then what is cut, in the order of DTensor.

    A dim that several axes cut is cut by the outermost first, so it is put together by the
    innermost first.
    """
    said = sorted(along, key=lambda one: one[0])
    changes: list[_Along] = []
    for axis, src, dst in said:
        if _entangled((axis, src, dst), said):
            changes += [(axis, src, Replicate()), (axis, Replicate(), dst)]
        elif src != dst:
            changes.append((axis, src, dst))
    together = [one for one in changes if one[1] != Replicate()]
    if any(isinstance(src, Shard) for _, src, _ in said):
        together.reverse()
    return [
        local_redistribution(src, dst, mesh, axis, what)
        for axis, src, dst in [*together, *(one for one in changes if one[1] == Replicate())]
    ]


def _entangled(move: _Along, said: Iterable[_Along]) -> bool:
    """Whether a shard cannot stay one, as another axis begins or ends to cut its dims."""
    axis, src, dst = move
    if not (isinstance(src, Shard) and isinstance(dst, Shard)):
        return False
    return any(
        one in (src, dst) and before != after and (other < axis or src != dst)
        for other, before, after in said
        for one in (before, after)
        if other != axis
    )
