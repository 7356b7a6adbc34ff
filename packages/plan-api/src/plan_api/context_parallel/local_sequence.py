"""Sequences that context parallelism shards, on local tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from plan_api.context_parallel.batch import order_of
from plan_api.context_parallel.order import SequenceSharding
from plan_api.context_parallel.reorder import SequenceReorder
from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.runtime.hooks import TensorTransform
from plan_api.spec.axes import axis_names

__all__ = ["sequence_transform", "without_sharded_positions"]


def sequence_transform(site: Site, step: SiteStep, mesh: DeviceMesh) -> TensorTransform:
    """Returns what a hook does with the local tensors of a step of `Plan.sequence`.

    Args:
        site: a site on the inputs or outputs of a module.
        step: the step.
        mesh: the plan's mesh.

    Raises:
        ValueError: the tensor is an output, or an input of a module within the model that has no
            positions: static mode does not know its global length.
    """
    if site.hook_point is HookPoint.FORWARD_PRE:
        if _has_positions(step):
            return _LocalPositions(step, mesh)
        if not site.path:
            return SequenceReorder(step, mesh, site)
    raise ValueError(
        f"{site.name}:{step.tensor}:{step.index}: expected a sequence that enters the model, or "
        f"positions (sequence(positions=True)), as static mode does not know the global length of "
        f"others, got {step.description}; leave the entry out, or use mode='eager'"
    )


def without_sharded_positions(site: Site, step: SiteStep) -> SiteStep:
    """Returns a step without the axes along which positions are made for this rank's tokens."""
    axes = {
        axis
        for other in site.steps
        if other.kind is OpKind.ORDER and other.index == step.index and _has_positions(other)
        for axis in other.moves
    }
    return replace(
        step, moves={name: move for name, move in step.moves.items() if name not in axes}
    )


def _has_positions(step: SiteStep) -> bool:
    return any(dict(move.options).get("positions") for move in step.moves.values())


class _LocalPositions:
    """Moves positions that count this rank's tokens to those in the whole sequence.

    Args:
        step: of a site.
        mesh: of the plan.
    """

    settled: DTensorSpec | None = None  # part of the protocol of hooks; here nothing is a DTensor

    def __init__(self, step: SiteStep, mesh: DeviceMesh) -> None:
        ((axis, move),) = step.moves.items()
        number = axis_names(mesh).index(axis)
        self._dim: int = getattr(move.dst, "dim", 0)
        self._rank = mesh.get_local_rank(number)
        self._order = SequenceSharding(dict(move.options)["order"], mesh.size(number))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the positions, of the same shape and dtype."""
        length, device = tensor.shape[self._dim], tensor.device
        order = order_of(self._order, length * self._order.ranks, "positions")
        own = order.positions(device).view(order.ranks, length)[self._rank]
        moved = (own - torch.arange(length, device=device)).to(tensor.dtype)
        return tensor + moved.view([-1] + [1] * (tensor.ndim - 1 - self._dim))
