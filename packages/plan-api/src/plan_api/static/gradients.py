"""Moves gradients from local parameters to their parameters, as DTensors, and reduces them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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

__all__ = ["LocalParamGradients"]


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
        self._sharded_gradients = [one for one in self._local_gradients if not one.is_unsharded]
        self._unsharded_gradients = [one for one in self._local_gradients if one.is_unsharded]
        super().__init__(model, reduces_at_end, coverage, bucket_mb, excluded, warns=warns)

    def reset(self, model: nn.Module) -> None:
        """Registers the hooks again, after parameters or their dtypes have been replaced."""
        self.remove()
        self._reducer = None
        for gradient in self._local_gradients:
            gradient.reset()
        self._start(model)

    def leaves(self, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
        """See `GradientReduction.leaves`."""
        own = {id(one.source.param): one.source.tensor for one in self._local_gradients}
        for param in parameters:
            yield own.get(id(param), param)

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
        self._register_on(
            (
                dtensor_param.param
                for dtensor_param in self._dtensor_params
                if dtensor_param.param.requires_grad
            ),
            after,
        )
        alive = weakref.ref(self)

        def queue(_: torch.Tensor) -> None:
            if (gradients := alive()) is not None and not gradients._is_queued:
                gradients._queue_end_of_backward()

        for number, gradient in enumerate(self._local_gradients):
            hook: Callable[[torch.Tensor], None] = queue  # which costs less: all at the end
            if self._reducer is not None:
                hook = partial(_call_if_alive, alive, type(self)._reduce_in_bucket, number)
            elif gradient.is_unsharded and not self._reduces_at_end:
                hook = partial(_call_if_alive, alive, type(self)._reduce_now, number)
            gradient.source.call_on_gradient(hook)

    def _reduce_in_bucket(self, number: int) -> None:
        gradient = self._local_gradients[number]
        assert self._reducer is not None
        self._reducer.accumulate(gradient.source.param, gradient.detach())
        self._after_accumulate(gradient.source.param)

    def _reduce_now(self, number: int) -> None:
        gradient = self._local_gradients[number]
        gradient.accumulate(gradient.detach())
        self._after_accumulate(gradient.source.param)

    def _collect(self) -> None:
        if self._reducer is None:
            self._assign_all()
            return
        self._reducer.set_requires_gradient_sync(False)
        for gradient in self._local_gradients:
            if gradient.source.tensor.grad is not None:
                self._reducer.accumulate(gradient.source.param, gradient.detach())

    def _assign_all(self) -> None:
        # After every backward: an operation on all gradients takes half of the time that it takes
        # between other operations on each of them.
        ready = [
            (gradient, local)
            for gradient in self._sharded_gradients
            if (local := gradient.source.tensor.grad) is not None
        ]
        for gradient, _ in ready:
            gradient.source.tensor.grad = None
        dtensors = [gradient.as_dtensor(local) for gradient, local in ready]
        for (gradient, _), dtensor in zip(ready, dtensors, strict=True):
            gradient.accumulate(dtensor)
        for gradient in self._unsharded_gradients:  # each is released before the next is reduced
            if gradient.source.tensor.grad is not None:
                gradient.accumulate(gradient.detach())

    def _end_of_backward(self) -> None:
        if self._reducer is None:
            self._assign_all()
        if self._requires_sync:
            super()._end_of_backward()
        else:
            self._is_queued = False


def _call_if_alive(
    gradients: weakref.ref[LocalParamGradients],
    method: Callable[[LocalParamGradients, int], None],
    number: int,
    _: torch.Tensor,
) -> None:
    if (alive := gradients()) is not None:
        method(alive, number)


class _LocalGradient:
    """The gradient of one local parameter, which becomes its parameter's, as a DTensor.

    Args:
        name: the first name of the parameter.
        source: the local parameter, or the unsharded parameter if it has phases.
        placements: by axis, the gradient's placements that differ from the source's.

    Attributes:
        is_unsharded: whether the parameter has phases: the gradient is larger than the parameter.
    """

    def __init__(
        self,
        name: str,
        source: LocalParam | UnshardedLocalParam,
        placements: Mapping[str, Placement],
    ) -> None:
        self.name, self.source = name, source
        self.is_unsharded = isinstance(source, UnshardedLocalParam)
        self._placements = placements
        self._param: torch.Tensor | None = None
        self._spec: DTensorSpec | None = None

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
            self._param, self._spec = param, self._make_spec()
        # DTensor() would call an __init__ that does nothing, and takes time.
        assert self._spec is not None
        return DTensor.__new__(DTensor, local, self._spec, requires_grad=False)

    def reset(self) -> None:
        """Forgets the parameter, which has been replaced or has another dtype."""
        self._param = self._spec = None

    def accumulate(self, new: DTensor) -> None:
        """Accumulates a gradient in the parameter, as autograd would."""
        param = self.source.param
        grad: Any = param.grad
        if grad is None:
            param.grad = new
        elif grad.placements == new.placements:
            grad._local_tensor.add_(new._local_tensor)
        else:
            param.grad = grad + new

    def _make_spec(self) -> DTensorSpec:
        param = self.source.param
        mesh: DeviceMesh = param.device_mesh
        placements = tuple(
            self._placements.get(axis, placement)
            for axis, placement in zip(axis_names(mesh), self.source.placements, strict=True)
        )
        return DTensorSpec(mesh, placements, tensor_meta=param._spec.tensor_meta)
