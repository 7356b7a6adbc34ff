"""Moves gradients from local parameters to their parameters, as DTensors, and reduces them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.runtime.gradients import GradientReduction, sharded_like
from plan_api.runtime.hooks import SiteCoverage
from plan_api.spec.axes import axis_names
from plan_api.static.local_params import LocalParam, UnshardedLocalParam

if TYPE_CHECKING:
    from fused_comm import GradReducer

__all__ = ["LocalParamGradients"]

# The references to a tensor in C++; where torch has no such count no DTensor is reused.
_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 2)


class LocalParamGradients(GradientReduction):
    """Places gradients as their parameters at the end of backward, in static mode.

    Args:
        model: the model, in static mode.
        local_params: the model's local parameters.
        unsharded: the parameters with phases, by name.
        reduces_at_end: see `GradientReduction`.
        placements: by parameter and axis, placements of gradients that differ from the
            parameter's, such as Partial.
        coverage: see `GradientReduction`.
        bucket_mb: see `GradientReduction`.
        excluded: see `GradientReduction`.
        warns: see `GradientReduction`.
    """

    def __init__(
        self,
        model: nn.Module,
        local_params: Sequence[LocalParam],
        unsharded: Mapping[str, UnshardedLocalParam],
        reduces_at_end: bool,
        placements: Mapping[str, Mapping[str, Placement]],
        coverage: SiteCoverage,
        bucket_mb: float | None,
        excluded: Collection[str],
        *,
        warns: bool,
    ) -> None:
        local_params = [one for one in local_params if one.name not in excluded]
        self._needs_reduction = bool(placements) or bool(unsharded)
        self._dtensor_params = [
            local_param
            for local_param in local_params
            if not local_param.visible and local_param.name not in unsharded
        ]
        self._local_gradients = [
            _LocalGradient(one.name, unsharded.get(one.name, one), placements.get(one.name, {}))
            for one in local_params
            if one.visible or one.name in unsharded
        ]
        super().__init__(model, reduces_at_end, coverage, bucket_mb, excluded, warns=warns)

    def reset(self, model: nn.Module) -> None:
        """Registers the hooks again, after parameters or their dtypes have been replaced."""
        self.remove()
        self._reducer = None
        for gradient in self._local_gradients:
            gradient.reset()
        self._start(model)

    def free_unused(self) -> None:
        """Frees the memory of gradients to which nothing else refers."""
        for gradient in self._local_gradients:
            gradient.free_unused()

    def by_name(self) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], DTensor]]]:
        """Returns what modules use of each parameter, and what makes its gradient a DTensor."""
        found: dict[str, Any] = {
            one.name: (one.param, lambda grad: grad) for one in self._dtensor_params
        }
        for gradient in self._local_gradients:
            found[gradient.name] = (gradient.source.tensor, gradient.as_dtensor)
        return found

    def _may_reduce(self) -> bool:
        return self._needs_reduction or bool(self._dtensor_params)

    def _register_hooks(self, after: Callable[[torch.Tensor], None]) -> None:
        reducer = self._reducer
        self._register_on(
            (
                dtensor_param.param
                for dtensor_param in self._dtensor_params
                if dtensor_param.param.requires_grad
            ),
            after,
        )
        on_gradient: Callable[[], None]
        for gradient in self._local_gradients:
            if reducer is not None:
                on_gradient = partial(self._reduce_in_bucket, gradient, reducer)
            elif gradient.is_unsharded and not self._reduces_at_end:
                on_gradient = partial(self._reduce_now, gradient)
            else:  # all are assigned at the end, which costs less
                on_gradient = self._queue_end_of_backward
            gradient.source.call_on_gradient(on_gradient)

    def _reduce_in_bucket(self, gradient: _LocalGradient, reducer: GradReducer) -> None:
        reducer.accumulate(gradient.source.param, gradient.detach())
        self._after_accumulate(gradient.source.param)

    def _reduce_now(self, gradient: _LocalGradient) -> None:
        gradient.assign()
        self._after_accumulate(gradient.source.param)

    def _end_of_backward(self) -> None:
        if self._reducer is None:
            for gradient in self._local_gradients:
                if gradient.source.tensor.grad is not None:
                    gradient.assign()
        if self._requires_sync:
            super()._end_of_backward()
            if self._needs_reduction:
                self.free_unused()
        else:
            self._is_queued = False


class _LocalGradient:
    """The gradient of one local parameter, which becomes its parameter's, as a DTensor.

    Args:
        name: the first name of the parameter.
        source: the local parameter, or the unsharded parameter if it has phases.
        placements: by axis, the gradient's placements that differ from the source's.
    """

    def __init__(
        self,
        name: str,
        source: LocalParam | UnshardedLocalParam,
        placements: Mapping[str, Placement],
    ) -> None:
        self.name, self.source = name, source
        self._placements = placements
        self._param: torch.Tensor | None = None
        self._spec: DTensorSpec | None = None
        self._assigned: Any = None  # the last DTensor; reused if nothing else refers to it

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameter has phases: the gradient is larger than the parameter."""
        return isinstance(self.source, UnshardedLocalParam)

    def detach(self) -> DTensor:
        """Removes the source's gradient and returns it as a DTensor, which may be Partial."""
        tensor = self.source.tensor
        local, tensor.grad = tensor.grad, None
        assert local is not None
        grad = self.as_dtensor(local)
        if self.is_unsharded:
            return sharded_like(self.source.param.placements, grad)
        return grad

    def as_dtensor(self, local: torch.Tensor) -> DTensor:
        """Returns a gradient of the source as a DTensor."""
        param = self.source.param
        if param is not self._param:
            self._param, self._spec, self._assigned = param, self._make_spec(), None
        # DTensor() would call an __init__ that does nothing, and takes time.
        assert self._spec is not None
        return DTensor.__new__(DTensor, local, self._spec, requires_grad=False)

    def reset(self) -> None:
        """Forgets the parameter, which has been replaced or has another dtype."""
        self._param = self._spec = self._assigned = None

    def assign(self) -> None:
        """Accumulates the local parameter's gradient in its parameter, as autograd would."""
        tensor, param = self.source.tensor, self.source.param
        grad: Any = param.grad
        known: Any = self._param
        if grad is None and param is known and self._is_unused() and not self.is_unsharded:
            self._assigned._local_tensor = tensor.grad
            tensor.grad = None
            param.grad = self._assigned
        elif grad is None:
            param.grad = self._assigned = self.detach()
        elif grad.placements == (new := self.detach()).placements:
            grad._local_tensor.add_(new._local_tensor)
        else:
            param.grad = grad + new

    def free_unused(self) -> None:
        """Frees the last gradient if nothing else refers to it."""
        if self._is_unused():
            self._assigned._local_tensor = None

    def _is_unused(self) -> bool:
        assigned = self._assigned
        return assigned is not None and getrefcount(assigned) == 3 and _use_count(assigned) == 1

    def _make_spec(self) -> DTensorSpec:
        param = self.source.param
        mesh: DeviceMesh = param.device_mesh
        placements = tuple(
            self._placements.get(axis, placement)
            for axis, placement in zip(axis_names(mesh), self.source.placements, strict=True)
        )
        return DTensorSpec(mesh, placements, tensor_meta=param._spec.tensor_meta)
