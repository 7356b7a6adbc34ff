"""GradientReduction of leaves, handed to their parameters as DTensors and reduced as ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.runtime.gradients import GradientReduction
from plan_api.runtime.hooks import SiteCoverage
from plan_api.spec.axes import axis_names
from plan_api.static.leaves import Leaf

if TYPE_CHECKING:
    from fused_comm import GradReducer

__all__ = ["LeafGradients"]

# How many have a tensor in C++; a torch that does not say it has no gradient given again.
_owners: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 2)


class LeafGradients(GradientReduction):
    """Places gradients as their parameters when a backward ends, of a model in static mode.

    Args:
        model: whose parameters they are of.
        leaves: of the model.
        said: how gradients are placed where that is not as their parameters, by parameter and axis.
        coverage: as in `GradientReduction`.
        bucket_mb: as in `GradientReduction`.
        warns: as in `GradientReduction`.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[Leaf],
        said: Mapping[str, Mapping[str, Placement]],
        coverage: SiteCoverage,
        bucket_mb: float | None,
        *,
        warns: bool,
    ) -> None:
        self._said = said
        self._on_dtensors = [leaf for leaf in leaves if not leaf.shown]
        self._deliveries = [
            _Delivery(leaf, said.get(leaf.name, {})) for leaf in leaves if leaf.shown
        ]
        super().__init__(model, False, coverage, bucket_mb, warns=warns)

    def renew(self, model: nn.Module) -> None:
        """Begins again: parameters are others, or have another dtype, than they were."""
        self.remove()
        self._reducer = None
        for delivery in self._deliveries:
            delivery.forget()
        self._start(model)

    def clear(self) -> None:
        """Lets go of gradients that nobody else has any more."""
        for delivery in self._deliveries:
            delivery.clear()

    def of(self, leaf: Leaf) -> tuple[torch.Tensor, Callable[[torch.Tensor], DTensor]]:
        """What modules use of a parameter, and what makes its gradient a DTensor."""
        if not leaf.shown:
            return leaf.param, lambda grad: grad
        delivery = next(one for one in self._deliveries if one.leaf is leaf)
        return leaf.tensor, delivery.placed

    def _may_reduce(self) -> bool:
        return bool(self._said or self._on_dtensors)

    def _register_hooks(self, after: Callable[[torch.Tensor], None]) -> None:
        reducer = self._reducer
        self._register_on(
            (leaf.param for leaf in self._on_dtensors if leaf.param.requires_grad), after
        )
        for delivery in self._deliveries:
            if reducer is None:  # all are delivered at the end, which costs less
                delivery.leaf.tell(self._queue_end_of_backward)
            else:
                delivery.leaf.tell(partial(self._reduce, delivery, reducer))

    def _reduce(self, delivery: _Delivery, reducer: GradReducer) -> None:
        reducer.accumulate(delivery.leaf.param, delivery.take())
        self._after_accumulate(delivery.leaf.param)

    def _end_of_backward(self) -> None:
        if self._reducer is None:
            for delivery in self._deliveries:
                if delivery.leaf.tensor.grad is not None:
                    delivery.deliver()
        if self._requires_sync:
            super()._end_of_backward()
            if self._said:
                self.clear()
        else:
            self._is_queued = False


class _Delivery:
    """Of one leaf's gradients to its parameter, as DTensors.

    Args:
        leaf: whose.
        said: how they are placed where that is not as the parameter, by axis.
    """

    def __init__(self, leaf: Leaf, said: Mapping[str, Placement]) -> None:
        self.leaf = leaf
        self._said = said
        self._param: torch.Tensor | None = None
        self._spec: DTensorSpec | None = None
        self._given: Any = None  # the last one, which is given again if nobody else has it

    def take(self) -> DTensor:
        """The leaf's gradient, which it has no more."""
        leaf = self.leaf
        local, leaf.tensor.grad = leaf.tensor.grad, None
        assert local is not None
        return self.placed(local)

    def placed(self, local: torch.Tensor) -> DTensor:
        """A gradient of the leaf as a DTensor."""
        param = self.leaf.param
        if param is not self._param:
            self._param, self._spec, self._given = param, self._placed(), None
        # DTensor() would call an __init__ that does nothing, and takes its time for it.
        assert self._spec is not None
        return DTensor.__new__(DTensor, local, self._spec, requires_grad=False)

    def forget(self) -> None:
        """The parameter is another, or has another dtype."""
        self._param = self._spec = self._given = None

    def deliver(self) -> None:
        """The leaf's gradient becomes its parameter's, as if autograd had accumulated it there."""
        leaf, param = self.leaf, self.leaf.param
        grad: Any = param.grad
        known: Any = self._param
        if grad is None and param is known and self._is_free():
            self._given._local_tensor = leaf.tensor.grad
            leaf.tensor.grad = None
            param.grad = self._given
        elif grad is None:
            param.grad = self._given = self.take()
        elif grad.placements == (new := self.take()).placements:
            grad._local_tensor.add_(new._local_tensor)
        else:
            param.grad = grad + new

    def clear(self) -> None:
        """Lets go of the last gradient if nobody else has it."""
        if self._is_free():
            self._given._local_tensor = None

    def _is_free(self) -> bool:
        given = self._given
        return given is not None and getrefcount(given) == 3 and _owners(given) == 1

    def _placed(self) -> DTensorSpec:
        param = self.leaf.param
        mesh: DeviceMesh = param.device_mesh
        placements = tuple(
            self._said.get(axis, placement)
            for axis, placement in zip(axis_names(mesh), param.placements, strict=True)
        )
        return DTensorSpec(mesh, placements, tensor_meta=param._spec.tensor_meta)
