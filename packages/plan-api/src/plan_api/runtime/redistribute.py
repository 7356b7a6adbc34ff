"""Redistributes one tensor at a site: a plain tensor becomes a DTensor, a DTensor is moved."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import AxisMove, OpKind, SiteStep
from plan_api.ops.low_precision.tokens import TokenGather
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement

__all__ = ["Redistribution"]


class Redistribution:
    """Redistributes tensors as one step says; called with each tensor at the site.

    Args:
        step: of a site.
        mesh: of the plan.
        site: its name, for messages.

    Attributes:
        gather: gathers local tensors in float8; None: nothing is.
    """

    gather: TokenGather | None = None

    def __init__(self, step: SiteStep, mesh: DeviceMesh, site: str) -> None:
        axes = axis_names(mesh)
        self._step = step
        self._mesh = mesh
        self._what = f"{site}:{step.tensor}:{step.index}"
        self._in_backward = StepContext(f"the backward of {site}", step)
        self._annotates = step.kind is OpKind.ANNOTATE
        self._moves = {axes.index(axis): move for axis, move in step.moves.items()}
        # A plain tensor is the same on all ranks of an axis, unless the step says otherwise.
        self._plain_placements = tuple(
            _plain_placement(self._moves.get(axis), self._annotates) for axis in range(len(axes))
        )
        self._has_grad_dst = any(move.grad_dst is not None for move in self._moves.values())
        self._targets: dict[tuple[Placement, ...], tuple[Placement, ...]] = {}
        self.settled: DTensorSpec | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the redistributed tensor, or the same object if it has the placements.

        Raises:
            ValueError: it is on another mesh, or has other placements than the step's ``src``.
        """
        if torch.compiler.is_compiling():
            return self._traced(tensor)
        if not isinstance(tensor, DTensor):
            with moving(self._step, self._plain_placements, self._plain_placements):
                tensor = DTensor.from_local(
                    tensor, self._mesh, self._plain_placements, run_check=False
                )
        spec = tensor._spec
        target = self._targets.get(spec.placements)
        if target is None or spec.mesh is not self._mesh:
            target = self._targets.setdefault(spec.placements, self._target(tensor))
        unchanged = target is spec.placements or target == spec.placements
        if not self._has_grad_dst and unchanged:
            self.settled = spec
            return tensor
        with moving(self._step, spec.placements, target):
            if self.gather is not None and self._is_even(self.gather, tensor, target):
                grad_dst = self._grad_dst(spec.placements)
                return _RedistributeWithGradient.apply(  # type: ignore[no-any-return, no-untyped-call]
                    tensor, target, grad_dst, self._in_backward, self.gather
                )
            if self._has_grad_dst or any(map(_is_masked, spec.placements)):
                grad_dst = self._grad_dst(spec.placements)
                return _RedistributeWithGradient.apply(tensor, target, grad_dst, self._in_backward)  # type: ignore[no-any-return, no-untyped-call]
            return tensor.redistribute(placements=target)

    def _traced(self, tensor: torch.Tensor) -> torch.Tensor:
        """Does so in a graph of torch.compile, which cannot read specs."""
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self._mesh, self._plain_placements, run_check=False)
        placements = tensor.placements
        target = self._target(tensor)
        if not self._has_grad_dst and target == placements:
            return tensor
        if self._has_grad_dst or any(map(_is_masked, placements)):
            grad_dst = self._grad_dst(placements)
            return _RedistributeWithGradient.apply(tensor, target, grad_dst, self._in_backward)  # type: ignore[no-any-return, no-untyped-call]
        return tensor.redistribute(placements=target)

    def _is_even(self, gather: TokenGather, tensor: DTensor, target: tuple[Placement, ...]) -> bool:
        """Whether a tensor is gathered in float8: its shards are even, the axis' innermost."""
        own, dim, before = tensor._local_tensor, gather.dim, tensor.placements
        changed = [axis for axis in range(len(before)) if before[axis] != target[axis]]
        sharding = [axis for axis, one in enumerate(before) if one.is_shard(dim)]
        return (
            gather.takes(own)
            and changed == sharding[-1:]
            and own.shape[dim] * math.prod(map(self._mesh.size, sharding)) == tensor.shape[dim]
        )

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        return f"plan-api: {self._what}, {self._step.description}"

    def _target(self, tensor: DTensor) -> tuple[Placement, ...]:
        if tensor.device_mesh != self._mesh:
            raise ValueError(
                f"{self._what}: expected a DTensor on the plan's mesh {self._mesh}, got one on "
                f"{tensor.device_mesh}"
            )
        target = list(tensor.placements)
        for axis, move in self._moves.items():
            expected = move.dst if self._annotates else move.src
            if expected is not None and not _is(target[axis], expected):
                raise ValueError(
                    f"{self._what} is {format_placement(target[axis])} along "
                    f"{axis_names(self._mesh)[axis]!r}, and {self._step.source} says "
                    f"{format_placement(expected)}"
                )
            target[axis] = move.dst
        return tuple(target)

    def _grad_dst(self, placements: tuple[Placement, ...]) -> tuple[Placement | None, ...]:
        """Returns the gradient's placements afterwards; None for those of `_gradient_of_sum`."""
        grad_dst = [
            None if isinstance(placement, Partial) else placement for placement in placements
        ]
        for axis, move in self._moves.items():
            if move.grad_dst is not None:
                grad_dst[axis] = move.grad_dst
        return tuple(grad_dst)


def _is(placement: Placement, expected: Placement) -> bool:
    """Compares placements; Partials by reduction, as that of an embedding is a subclass."""
    if isinstance(placement, Partial) and isinstance(expected, Partial):
        return placement.reduce_op == expected.reduce_op
    return placement == expected


def _plain_placement(move: AxisMove | None, annotates: bool) -> Placement:
    if move is None:
        return Replicate()
    return (move.dst if annotates else move.src) or Replicate()


def _is_masked(placement: Placement) -> bool:
    """Whether it is the Partial of an embedding with sharded rows: torch's own subclass."""
    return isinstance(placement, Partial) and type(placement) is not Partial


def _gradient_of_sum(now: Placement) -> Placement:
    """Leaves a Partial, and replicates the rest: DTensor does not redistribute to Partial."""
    return now if isinstance(now, Partial) else Replicate()


class _RedistributeWithGradient(torch.autograd.Function):
    """A redistribution whose gradient gets placements of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: tuple[Placement, ...],
        grad_dst: tuple[Placement | None, ...],
        at: StepContext,
        gather: TokenGather | None = None,
    ) -> torch.Tensor:
        ctx.grad_dst, ctx.at = grad_dst, at
        if gather is not None:
            return DTensor.from_local(
                gather(tensor._local_tensor), tensor.device_mesh, target, run_check=False,
                shape=tensor.shape, stride=torch.empty(tensor.shape, device="meta").stride(),
            )  # fmt: skip
        moved = tensor.redistribute(placements=target)
        # Autograd functions may not return an argument.
        return tensor.view_as(tensor) if moved is tensor else moved

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        placements = [
            _gradient_of_sum(now) if dst is None else dst
            for dst, now in zip(ctx.grad_dst, grad.placements, strict=True)
        ]
        return grad.redistribute(placements=placements), None, None, None, None
