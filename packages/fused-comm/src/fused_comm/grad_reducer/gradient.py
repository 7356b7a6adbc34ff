"""The state of one parameter's gradient from backward to the optimizer.

Note: what autograd has accumulated since the last reduction is *fresh*: a term of a sum. The result
of a reduction is *finished*. Another backward must not add to a finished gradient, as the two have
different placements; so a finished gradient is set aside as the *earlier* one while there is a
fresh one, and is added when that is finished too. With a *bucket view*, fresh gradients are
accumulated in the bucket's buffer, and so is the finished one: it is copied in as this rank's term
of a sum whose result is itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from fused_comm import _compat
from fused_comm.bucket import Route, Slot
from fused_comm.reduction import Reduction, reduction_of
from fused_comm.sharding import local_tensor

__all__ = ["BucketView", "GradientState"]


@dataclass(frozen=True)
class BucketView:
    """A gradient's view of its bucket's buffer.

    Attributes:
        view: of the buffer, with the shape and dtype of the local gradient.
        reduction: of the buffer; nothing is scattered.
        owns_finished: whether this rank contributes a finished gradient; otherwise zeros.
    """

    view: torch.Tensor
    reduction: Reduction
    owns_finished: bool


class GradientState:
    """The state of a parameter's gradient.

    Args:
        name: of the parameter, for messages.
        param: the parameter.
        accumulate_dtype: in which fresh gradients are accumulated between reductions; None: as
            autograd does it.
    """

    def __init__(
        self, name: str, param: torch.Tensor, accumulate_dtype: torch.dtype | None
    ) -> None:
        self.name = name
        self.param = param
        self._accumulate_dtype = accumulate_dtype
        self._finished_ref: weakref.ref[torch.Tensor] | None = None
        self._earlier: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None  # local, of fresh gradients, in accumulate_dtype
        self._placeholder: torch.Tensor | None = None  # with their placements, without memory
        self._bucket_view: BucketView | None = None

    @property
    def _finished(self) -> torch.Tensor | None:
        """The finished gradient, as long as the parameter or anything else refers to it."""
        return None if self._finished_ref is None else self._finished_ref()

    @_finished.setter
    def _finished(self, grad: torch.Tensor | None) -> None:
        self._finished_ref = None if grad is None else weakref.ref(grad)

    @property
    def fresh(self) -> torch.Tensor | None:
        """The gradient since the last reduction, with the placements of autograd."""
        grad = self.param.grad
        if grad is not None and grad is not self._finished:
            return grad
        return self._placeholder

    def before_accumulation(self) -> None:
        """Prepares `param.grad` for a fresh gradient, which must not be added to a finished one."""
        grad = self.param.grad
        if grad is not None and grad is not self._finished:
            return
        if self._bucket_view is not None:
            self._copy_in(self._bucket_view, grad)
        elif grad is not None:
            self._earlier, self._finished, self.param.grad = grad, None, None

    def attach(self, view: BucketView | None) -> None:
        """Has the next backward accumulate in a bucket's buffer, on all ranks alike; None: not."""
        self._bucket_view = view

    def restore_finished(self) -> None:
        """Copies a finished gradient into the bucket, on ranks without a fresh one."""
        grad = self.param.grad
        if self._bucket_view is not None and grad is not None and grad is self._finished:
            self._copy_in(self._bucket_view, grad)

    def _copy_in(self, target: BucketView, finished: torch.Tensor | None) -> None:
        if finished is None or not target.owns_finished:
            target.view.zero_()
        elif local_tensor(finished).data_ptr() != target.view.data_ptr():
            target.view.copy_(local_tensor(finished))
        self._finished = None
        self.param.grad = self._as_grad(target.view, target.reduction, target.reduction.source)

    def _as_grad(
        self, local: torch.Tensor, reduction: Reduction, placements: tuple[Placement, ...]
    ) -> torch.Tensor:
        if reduction.mesh is None:
            return local
        return _compat.dtensor(local, self.param, reduction.mesh, placements)

    def accumulate(self) -> None:
        """Adds the fresh gradient to the sum in `accumulate_dtype`, and clears it."""
        grad = self.param.grad
        if grad is None or grad is self._finished or self._accumulate_dtype in (None, grad.dtype):
            return
        local = local_tensor(grad)
        if self._sum is None:
            self._sum = local.to(self._accumulate_dtype)
        else:
            self._sum.add_(local)
        self._placeholder, self.param.grad = self._placeholder_of(grad), None

    def _placeholder_of(self, grad: torch.Tensor) -> torch.Tensor:
        local = local_tensor(grad)
        one = local.new_empty(()).expand(local.shape)
        if not isinstance(grad, DTensor):
            return one
        return _compat.dtensor(one, self.param, grad.device_mesh, grad.placements)

    def reduction(self) -> Reduction | None:
        """Returns what the fresh gradient needs; None if there is none."""
        fresh = self.fresh
        return None if fresh is None else reduction_of(self.name, self.param, fresh)

    def contribution(self, reduction: Reduction, slot: Slot, route: Route) -> torch.Tensor | None:
        """Returns this rank's term of the sum, and forgets it; None where it has none.

        Raises:
            ValueError: the gradient has other placements or another shape than was planned.
        """
        local = self._take_fresh(reduction, route)
        earlier = self._earlier
        if earlier is None and self.param.grad is self._finished:  # and not set to None since
            earlier = self._finished
        if isinstance(earlier, DTensor) and earlier.placements != reduction.placements:
            term = _as_term(self.name, earlier, reduction, slot, route)
            local = term if local is None else local + term  # in the wider dtype of the two
            self._earlier = self._finished = self.param.grad = None
        return local

    def assign(self, local: torch.Tensor | None, reduction: Reduction) -> None:
        """Makes a reduced local tensor, plus an earlier gradient, the parameter's gradient.

        Args:
            local: this rank's part of the result; None where no rank had a gradient.
            reduction: that was made.
        """
        earlier, self._earlier = self._earlier, None
        if earlier is None and self.param.grad is self._finished:
            earlier = self._finished  # this rank had no fresh gradient
        if local is None:
            if earlier is not None:
                self.param.grad = self._finished = earlier
            return
        if local.dtype != reduction.dtype:
            local = local.to(reduction.dtype)
        if earlier is not None:
            local.add_(local_tensor(earlier))
        grad = self._as_grad(local, reduction, reduction.placements)
        if self.fresh is not None:  # accumulated while the bucket was in flight
            self._earlier = grad
        else:
            self.param.grad = self._finished = grad

    def _take_fresh(self, reduction: Reduction, route: Route) -> torch.Tensor | None:
        self.accumulate()
        fresh = self.fresh
        if fresh is None:
            return None
        local = local_tensor(fresh) if self._sum is None else self._sum
        placements = fresh.placements if isinstance(fresh, DTensor) else ()
        if placements != reduction.source or local.shape != reduction.shape:
            if placements != reduction.placements or reduction.scattered:
                raise ValueError(
                    f"gradient of {self.name!r}: expected {reduction.source} with local shape "
                    f"{tuple(reduction.shape)}, as in earlier steps, got {placements} with "
                    f"{tuple(local.shape)}: make a new GradReducer for a model that has changed"
                )
            # It was reduced already, by the script.
            local = local if route.owns_finished else torch.zeros_like(local)
        self._sum = self._placeholder = self._bucket_view = self.param.grad = None
        return local


def _as_term(
    name: str, earlier: torch.Tensor, reduction: Reduction, slot: Slot, route: Route
) -> torch.Tensor:
    """Makes a gradient that was reduced along other axes a term of the sum along these.

    Where it is replicated along an axis, the first rank of a sum contributes it, and every rank of
    a mean. A shard is contributed at its position, and zeros elsewhere.
    """
    assert isinstance(earlier, DTensor)
    mesh, local = earlier.device_mesh, earlier._local_tensor
    replicated = [
        axis
        for axis, (source, placement) in enumerate(
            zip(reduction.source, earlier.placements, strict=True)
        )
        if isinstance(source, Partial) and placement == Replicate()
    ]
    sharded = [one for one in reduction.scattered if not earlier.placements[one.axis].is_partial()]
    if sharded and len(sharded) != len(reduction.scattered):
        raise ValueError(
            f"gradient of {name!r} is {earlier.placements}, to become {reduction.placements}: "
            f"synchronize its scattered axes together"
        )
    term = torch.zeros(reduction.shape, dtype=local.dtype, device=local.device)
    if not route.averaged and any(mesh.get_local_rank(axis) != 0 for axis in replicated):
        return term
    if not sharded:
        return term.copy_(local)
    term[slot.own_slices].copy_(local)
    return term.mul_(route.rows) if route.averaged else term
