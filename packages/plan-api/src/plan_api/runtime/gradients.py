"""Gradients reduced in every backward, without a line in the training script."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.runtime.attribution import reducing
from plan_api.runtime.hooks import Fired

if TYPE_CHECKING:
    from fused_comm import GradReducer

__all__ = ["Gradients"]

_log = logging.getLogger("plan_api")


class Gradients:
    """Places gradients as their parameters during backward, or at its end.

    Of a model on ``meta`` it begins with the first forward: materialised parameters are others.

    Args:
        model: whose parameters they are of.
        waits: whether gradients stay whole until backward is through (ZeRO-1); otherwise they are
            sent as they come.
        fired: of the model's sites; those that the first step has not passed are named once.
        bucket_mb: of gradients that fused-comm sends together; None: they are sent one by one.
        warns: whether to warn of gradients that are sent one by one.
        without: the first names of parameters whose gradients somebody else reduces.
    """

    def __init__(
        self,
        model: nn.Module,
        waits: bool,
        fired: Fired,
        bucket_mb: float | None = None,
        without: Collection[str] = (),
        *,
        warns: bool = False,
    ) -> None:
        self._params: list[torch.Tensor] = []
        self._waits, self._bucket_mb, self._without = waits, bucket_mb, without
        self._fired: Fired | None = fired
        self._reducer: GradReducer | None = None
        self._synchronises = True
        self._queued = False
        self._warns = warns
        self._handles: list[RemovableHandle] = []
        if any(param.is_meta for param in model.parameters()):
            self._handles.append(model.register_forward_pre_hook(self._begin_once))
        else:
            self._begin(model)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated, and reduced by the next backward outside."""
        before, self._synchronises = self._synchronises, False
        try:
            self._tell()
            yield
        finally:
            self._synchronises = before
            self._tell()

    def remove(self) -> None:
        """Takes its hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        if self._reducer is not None:
            self._reducer.remove()

    def _tell(self) -> None:
        if self._reducer is not None:
            self._reducer.set_requires_gradient_sync(self._synchronises and not self._waits)

    def _begin_once(self, model: nn.Module, _: object) -> None:
        if self._params or not self._handles:
            return  # begun by a hook before this one
        self._handles.pop(0).remove()
        self._begin(model)

    def _begin(self, model: nn.Module) -> None:
        named = [
            (name, param)
            for name, param in model.named_parameters()
            if param.requires_grad and name not in self._without
        ]
        if not named:
            return
        self._params = [param for _, param in named]
        if self._reduces() and self._bucket_mb is not None:
            from fused_comm import GradReducer

            self._reducer = GradReducer(named, bucket_mb=self._bucket_mb)
            self._tell()
        # Autograd has hooks where the garbage collector does not look: they must not keep this.
        reference = weakref.ref(self)

        def after(param: torch.Tensor) -> None:
            if (alive := reference()) is not None:
                alive._after(param)

        self._listen(after)

    def _reduces(self) -> bool:
        """Whether there may be anything to reduce."""
        return True

    def _listen(self, after: Callable[[torch.Tensor], None]) -> None:
        """Has a function called after each gradient has been accumulated."""
        self._follow(self._params, after)

    def _follow(
        self, params: Iterable[torch.Tensor], after: Callable[[torch.Tensor], None]
    ) -> None:
        for param in params:
            if isinstance(param, DTensor):
                self._handles.append(param.register_hook(_cut_as(param.placements)))
            self._handles.append(param.register_post_accumulate_grad_hook(after))

    def _after(self, param: torch.Tensor) -> None:
        if not self._synchronises:
            return
        if self._reducer is None and not self._waits and self._reduces():
            self._reduce_one(param)
        self._queue()

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            # As torch/distributed/fsdp does it: runs when this backward is through.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._queued = False
        if self._reducer is not None:
            self._reducer.set_requires_gradient_sync(True)
            with reducing():
                self._reducer.finish()
            self._tell()
        elif self._reduces():  # what has waited, or was accumulated without synchronising
            for param in self._params:
                self._reduce_one(param)
        if self._fired is not None:
            never, self._fired = self._fired.never, None
            if never:
                sites = ", ".join(f"{site.path}.{site.moment.value}" for site in never)
                _log.warning("the first step did not pass these sites of the plan: %s", sites)

    def _reduce_one(self, param: torch.Tensor) -> None:
        if self._warns:
            self._warns = False
            warnings.warn(
                "plan-api reduces gradients one by one; with fused-comm they go in few "
                "collectives: pip install plan-api[comm]",
                stacklevel=2,
            )
        grad = param.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            return
        if grad.placements != param.placements:
            with reducing(param, grad.placements, param.placements):
                param.grad = grad.redistribute(placements=param.placements)


def _cut_as(
    placements: tuple[Placement, ...],
) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """A hook for gradients that are whole where their parameter is sharded, or sharded otherwise.

    Backward places them as its operators like it; what is Partial is left to be reduced.
    """

    def hook(grad: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(grad, DTensor) or grad.placements == placements:
            return None
        wanted = tuple(
            is_now if is_now.is_partial() else to
            for is_now, to in zip(grad.placements, placements, strict=True)
        )
        if wanted == grad.placements:
            return None
        with reducing(None, grad.placements, wanted):
            return grad.redistribute(placements=wanted)

    return hook
