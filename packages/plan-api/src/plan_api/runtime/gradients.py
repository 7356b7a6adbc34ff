"""Reduces gradients in every backward, without a call in the training script."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.runtime.attribution import reducing
from plan_api.runtime.hooks import SiteCoverage

if TYPE_CHECKING:
    from fused_comm import GradReducer

__all__ = ["GradientReduction", "sharded_like"]

_log = logging.getLogger("plan_api")


class GradientReduction:
    """Redistributes gradients to the placements of their parameters, during or after backward.

    For a model on ``meta`` it starts at the first forward, because materialising makes new
    parameters.

    Args:
        model: whose gradients are reduced.
        reduces_at_end: whether gradients stay unsharded until the end of backward (ZeRO-1);
            otherwise each is reduced when it is accumulated.
        coverage: of the model's sites; those that the first step did not run are logged once.
        bucket_mb: megabytes of a bucket of fused-comm; None: gradients are reduced one by one.
        excluded: the first names of parameters whose gradients fully_shard reduces.
        warns: whether to warn about gradients that are reduced one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        reduces_at_end: bool,
        coverage: SiteCoverage,
        bucket_mb: float | None = None,
        excluded: Collection[str] = (),
        *,
        warns: bool = False,
    ) -> None:
        self._params: list[torch.Tensor] = []
        self._reduces_at_end, self._bucket_mb, self._excluded = reduces_at_end, bucket_mb, excluded
        self._coverage: SiteCoverage | None = coverage
        self._reducer: GradReducer | None = None
        self._requires_sync = True
        self._is_queued = False
        self._warns = warns
        self._handles: list[RemovableHandle] = []
        if any(param.is_meta for param in model.parameters()):
            self._handles.append(model.register_forward_pre_hook(self._start_on_first_forward))
        else:
            self._start(model)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients within it; the next backward outside reduces them."""
        before, self._requires_sync = self._requires_sync, False
        try:
            self._set_reducer_sync()
            yield
        finally:
            self._requires_sync = before
            self._set_reducer_sync()

    def reduce(self) -> None:
        """Reduces what was accumulated under `no_sync`, outside of a backward; all ranks call it.

        For programs without a last backward that could reduce it: the schedules of pipelines
        compute some gradients by `torch.autograd.grad`, which calls no hooks.
        """
        self._collect()
        self._reduce_all()

    def leaves(self, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
        """Yields the leaf of autograd's graph that gets the gradient of each of some parameters.

        It is the parameter in Eager, and a plain tensor on its memory in static mode. For programs
        that search autograd's graph, as the schedules of pipelines do.

        Args:
            parameters: of the model.
        """
        yield from parameters

    def remove(self) -> None:
        """Removes its hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        if self._reducer is not None:
            self._reducer.remove()

    def _set_reducer_sync(self) -> None:
        if self._reducer is not None:
            self._reducer.set_requires_gradient_sync(
                self._requires_sync and not self._reduces_at_end
            )

    def _start_on_first_forward(self, model: nn.Module, _: object) -> None:
        if self._params or not self._handles:
            return  # another hook has started it
        self._handles.pop(0).remove()
        self._start(model)

    def _start(self, model: nn.Module) -> None:
        named = [
            (name, param)
            for name, param in model.named_parameters()
            if param.requires_grad and name not in self._excluded
        ]
        if not named:
            return
        self._params = [param for _, param in named]
        if self._may_reduce() and self._bucket_mb is not None:
            from fused_comm import GradReducer

            self._reducer = GradReducer(named, bucket_mb=self._bucket_mb)
            self._set_reducer_sync()
        # A weak reference: the garbage collector does not see cycles through autograd's hooks.
        reference = weakref.ref(self)

        def after(param: torch.Tensor) -> None:
            if (reduction := reference()) is not None:
                reduction._after_accumulate(param)

        self._register_hooks(after)

    def _may_reduce(self) -> bool:
        """Whether there may be anything to reduce."""
        return True

    def _register_hooks(self, after: Callable[[torch.Tensor], None]) -> None:
        """Registers a function to call after each gradient has been accumulated."""
        self._register_on(self._params, after)

    def _register_on(
        self, params: Iterable[torch.Tensor], after: Callable[[torch.Tensor], None]
    ) -> None:
        for param in params:
            if isinstance(param, DTensor):
                hook = partial(_sharded_hook, param.placements)
                self._handles.append(param.register_hook(hook))
            self._handles.append(param.register_post_accumulate_grad_hook(after))

    def _after_accumulate(self, param: torch.Tensor) -> None:
        if not self._requires_sync:
            return
        if self._reducer is None and not self._reduces_at_end and self._may_reduce():
            self._reduce_one(param)
        self._queue_end_of_backward()

    def _queue_end_of_backward(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            # As in torch/distributed/fsdp: called at the end of this backward.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _collect(self) -> None:
        """Gives parameters the gradients that backward has left elsewhere."""

    def _reduce_all(self) -> None:
        """Reduces deferred gradients, and those accumulated under `no_sync`."""
        if self._reducer is not None:
            self._reducer.set_requires_gradient_sync(True)
            with reducing():
                self._reducer.finish()
            self._set_reducer_sync()
        elif self._may_reduce():
            for param in self._params:
                self._reduce_one(param)

    def _end_of_backward(self) -> None:
        self._is_queued = False
        self._reduce_all()
        if self._coverage is not None:
            unused, self._coverage = self._coverage.unused_sites, None
            if unused:
                sites = ", ".join(f"{site.path}.{site.hook_point.value}" for site in unused)
                _log.warning("the first step did not run these sites of the plan: %s", sites)

    def _reduce_one(self, param: torch.Tensor) -> None:
        if self._warns:
            self._warns = False
            warnings.warn(
                "plan-api reduces gradients one by one; fused-comm reduces them in buckets, by few "
                "collectives: pip install plan-api[comm]",
                stacklevel=2,
            )
        grad = param.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            return
        if grad.placements != param.placements:
            with reducing(param, grad.placements, param.placements):
                param.grad = grad.redistribute(placements=param.placements)


def sharded_like(placements: tuple[Placement, ...], grad: DTensor) -> DTensor:
    """Shards a gradient like its parameter, and leaves Partials to be reduced.

    Backward gives it the placements that its operators choose.

    Args:
        placements: of the parameter.
        grad: as backward has computed it; returned if nothing changes.
    """
    target = tuple(
        now if now.is_partial() else to for now, to in zip(grad.placements, placements, strict=True)
    )
    if target == grad.placements:
        return grad
    with reducing(None, grad.placements, target):
        return grad.redistribute(placements=target)


def _sharded_hook(placements: tuple[Placement, ...], grad: torch.Tensor) -> torch.Tensor | None:
    return sharded_like(placements, grad) if isinstance(grad, DTensor) else None
