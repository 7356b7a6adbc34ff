"""One parameter's gradient from backward to the optimizer.

Note: what autograd has accumulated since the last reduction is *fresh*: a part of a sum. What a
reduction has made is *finished*. Another backward must not add the one to the other, for they are
not placed alike; so what was finished is *kept* aside while there is something fresh, and added
when that is finished too. With a *home*, a view of a bucket's buffer, fresh gradients are added up
right there, and so is what was finished: as this rank's part of a sum that makes the same again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from fused_comm import _compat
from fused_comm.bucket import Route, Slot
from fused_comm.reduction import Reduction, local_of, reduction_of

__all__ = ["Gradient", "Home"]


@dataclass(frozen=True)
class Home:
    """A gradient's place in a bucket's buffer.

    Attributes:
        view: of the buffer, with the shape and dtype of the local gradient.
        reduction: what is done with the buffer; nothing is scattered.
        keeps: whether this rank's part of what is finished is all of it; nothing otherwise.
    """

    view: torch.Tensor
    reduction: Reduction
    keeps: bool


class Gradient:
    """The state of a parameter's gradient.

    Args:
        name: for messages.
        param: the parameter.
        accumulate_dtype: in which fresh gradients are added up between reductions; None: as
            autograd does it.
    """

    def __init__(
        self, name: str, param: torch.Tensor, accumulate_dtype: torch.dtype | None
    ) -> None:
        self.name = name
        self.param = param
        self._accumulate_dtype = accumulate_dtype
        self._assigned: weakref.ref[torch.Tensor] | None = None
        self._kept: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None  # local, of fresh ones, in accumulate_dtype
        self._like: torch.Tensor | None = None  # placed as they were, and of no memory
        self._home: Home | None = None

    @property
    def _finished(self) -> torch.Tensor | None:
        """What was assigned to param.grad, while it or anybody has it."""
        return None if self._assigned is None else self._assigned()

    @_finished.setter
    def _finished(self, grad: torch.Tensor | None) -> None:
        self._assigned = None if grad is None else weakref.ref(grad)

    @property
    def fresh(self) -> torch.Tensor | None:
        """What has come since the last reduction, as autograd placed it."""
        grad = self.param.grad
        if grad is not None and grad is not self._finished:
            return grad
        return self._like

    def before_accumulation(self) -> None:
        """Makes room for a fresh gradient: what is finished is not added to."""
        grad = self.param.grad
        if grad is not None and grad is not self._finished:
            return
        if self._home is not None:
            self._move_in(self._home, grad)
        elif grad is not None:
            self._kept, self._finished, self.param.grad = grad, None, None

    def live_in(self, home: Home | None) -> None:
        """Gives it a place in a buffer from the next backward on, alike on all ranks; or none."""
        self._home = home

    def return_home(self) -> None:
        """Before the sum, on ranks where nothing came: what is finished is a part of it too."""
        grad = self.param.grad
        if self._home is not None and grad is not None and grad is self._finished:
            self._move_in(self._home, grad)

    def _move_in(self, home: Home, finished: torch.Tensor | None) -> None:
        if finished is None or not home.keeps:
            home.view.zero_()
        elif local_of(finished).data_ptr() != home.view.data_ptr():
            home.view.copy_(local_of(finished))
        self._finished = None
        self.param.grad = self._placed(home.view, home.reduction, home.reduction.source)

    def _placed(
        self, local: torch.Tensor, reduction: Reduction, placements: tuple[Placement, ...]
    ) -> torch.Tensor:
        if reduction.mesh is None:
            return local
        return _compat.dtensor(local, self.param, reduction.mesh, placements)

    def set_aside(self) -> None:
        """Adds what is fresh to the sum in the wider dtype, and forgets it."""
        grad = self.param.grad
        if grad is None or grad is self._finished or self._accumulate_dtype in (None, grad.dtype):
            return
        local = local_of(grad)
        if self._sum is None:
            self._sum = local.to(self._accumulate_dtype)
        else:
            self._sum.add_(local)
        self._like, self.param.grad = self._stub(grad), None

    def _stub(self, grad: torch.Tensor) -> torch.Tensor:
        local = local_of(grad)
        one = local.new_empty(()).expand(local.shape)
        if not isinstance(grad, DTensor):
            return one
        return _compat.dtensor(one, self.param, grad.device_mesh, grad.placements)

    def reduction(self) -> Reduction | None:
        """What the fresh gradient needs; None if there is none."""
        fresh = self.fresh
        return None if fresh is None else reduction_of(self.name, self.param, fresh)

    def contribution(self, reduction: Reduction, slot: Slot, route: Route) -> torch.Tensor | None:
        """This rank's part of the sum, which is nobody's afterwards; None if it has none.

        Raises:
            ValueError: the gradient is placed or shaped otherwise than was planned.
        """
        local = self._take(reduction, route)
        earlier = self._kept
        if earlier is None and self.param.grad is self._finished:  # and not set to None since
            earlier = self._finished
        if isinstance(earlier, DTensor) and earlier.placements != reduction.placements:
            folded = _folded(self.name, earlier, reduction, slot, route)
            local = folded if local is None else local + folded  # the wider dtype's
            self._kept = self._finished = self.param.grad = None
        return local

    def finish(self, local: torch.Tensor | None, reduction: Reduction) -> None:
        """Makes a reduced local tensor the parameter's gradient, with what was kept.

        Args:
            local: this rank's part of the result; None where no rank had a gradient.
            reduction: what was done.
        """
        kept, self._kept = self._kept, None
        if kept is None and self.param.grad is self._finished:
            kept = self._finished  # nothing came here
        if local is None:
            if kept is not None:
                self.param.grad = self._finished = kept
            return
        if local.dtype != reduction.dtype:
            local = local.to(reduction.dtype)
        if kept is not None:
            local.add_(local_of(kept))
        grad = self._placed(local, reduction, reduction.placements)
        if self.fresh is not None:  # which came while this was on its way
            self._kept = grad
        else:
            self.param.grad = self._finished = grad

    def _take(self, reduction: Reduction, route: Route) -> torch.Tensor | None:
        self.set_aside()
        fresh = self.fresh
        if fresh is None:
            return None
        local = local_of(fresh) if self._sum is None else self._sum
        placements = fresh.placements if isinstance(fresh, DTensor) else ()
        if placements != reduction.source or local.shape != reduction.shape:
            if placements != reduction.placements or reduction.scattered:
                raise ValueError(
                    f"gradient of {self.name!r}: it was {reduction.source} with local shape "
                    f"{tuple(reduction.shape)}, and now is {placements} with "
                    f"{tuple(local.shape)}: make a new GradReducer for a model that has changed"
                )
            # It is the same on all ranks already.
            local = local if route.keeps_finished else torch.zeros_like(local)
        self._sum = self._like = self._home = self.param.grad = None
        return local


def _folded(
    name: str, earlier: torch.Tensor, reduction: Reduction, slot: Slot, route: Route
) -> torch.Tensor:
    """A gradient that is reduced along other axes, as a part of the sum along these.

    Of what is replicated along an axis the first rank has all, or of a mean each its share; what is
    a shard stands alone in its place.
    """
    assert isinstance(earlier, DTensor)
    mesh, local = earlier.device_mesh, earlier._local_tensor
    done = [
        axis
        for axis, (source, placement) in enumerate(
            zip(reduction.source, earlier.placements, strict=True)
        )
        if isinstance(source, Partial) and placement == Replicate()
    ]
    cut = [one for one in reduction.scattered if not earlier.placements[one.axis].is_partial()]
    if cut and len(cut) != len(reduction.scattered):
        raise ValueError(
            f"gradient of {name!r} is {earlier.placements}, to be {reduction.placements}: its "
            f"scattered axes have to be synchronised together"
        )
    part = torch.zeros(reduction.shape, dtype=local.dtype, device=local.device)
    if not route.averaged and any(mesh.get_local_rank(axis) != 0 for axis in done):
        return part
    if not cut:
        return part.copy_(local)
    part[slot.own_piece].copy_(local)
    return part.mul_(route.rows) if route.averaged else part
