"""Gradients of leaves, handed to their parameters as DTensors and reduced as ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.axes import axis_names
from plan_api.gradients import Gradients
from plan_api.hooks import Fired
from plan_api.static.leaves import Leaf

__all__ = ["LeafGradients"]


class LeafGradients(Gradients):
    """Places gradients as their parameters when a backward ends, of a model in static mode.

    Args:
        model: whose parameters they are of.
        leaves: of the model.
        said: how gradients are placed where that is not as their parameters, by parameter and axis.
        fired: as in `Gradients`.
        bucket_mb: as in `Gradients`.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[Leaf],
        said: Mapping[str, Mapping[str, Placement]],
        fired: Fired,
        bucket_mb: float,
    ) -> None:
        self._leaves = leaves
        self._said = said
        self._specs: dict[int, tuple[Any, DTensorSpec]] = {}  # by leaf
        super().__init__(model, False, fired, bucket_mb)

    def renew(self, model: nn.Module) -> None:
        """Begins again: parameters are others, or have another dtype, than they were."""
        self.remove()
        self._reducer = None
        self._specs.clear()
        self._begin(model)

    def _reduces(self) -> bool:
        return bool(self._said)

    def _listen(self, after: Callable[[torch.Tensor], None]) -> None:
        def told(leaf: Leaf) -> None:
            self._deliver(leaf)
            after(leaf.param)

        for leaf in self._leaves:
            leaf.tell(told)

    def _deliver(self, leaf: Leaf) -> None:
        """The leaf's gradient becomes its parameter's, as if autograd had accumulated it there."""
        local, leaf.tensor.grad = leaf.tensor.grad, None
        assert local is not None
        param = leaf.param
        spec = self._spec(leaf, local)
        grad = DTensor(local, spec, requires_grad=False)
        if self._reducer is not None:
            self._reducer.accumulate(param, grad)
        elif param.grad is None:
            param.grad = grad
        elif param.grad.placements == grad.placements:
            param.grad._local_tensor.add_(local)
        else:
            param.grad = param.grad + grad

    def _spec(self, leaf: Leaf, local: torch.Tensor) -> DTensorSpec:
        known = self._specs.get(id(leaf))
        if known is not None and known[0] is leaf.param:
            return known[1]
        param = leaf.param
        said = self._said.get(leaf.name, {})
        mesh: DeviceMesh = param.device_mesh
        placements = tuple(
            said.get(axis, placement)
            for axis, placement in zip(axis_names(mesh), param.placements, strict=True)
        )
        spec = DTensorSpec(mesh, placements, tensor_meta=param._spec.tensor_meta)
        self._specs[id(leaf)] = (param, spec)
        return spec
