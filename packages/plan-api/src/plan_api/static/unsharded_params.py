"""Parameters with phases in static mode: plain tensors while their module runs, DTensors between.

The sharded parameter is Eager's DTensor, which optimizers and checkpoints have. A gradient has the
shape of the unsharded local tensor, so autograd accumulates it in a leaf of that shape, from which
`plan_api.static.gradients` moves it to the sharded parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import Lowered, Schedule
from plan_api.runtime.local_shards import local_shape
from plan_api.runtime.state import use_unsharded_params
from plan_api.runtime.unsharded_param import UnshardedParam
from plan_api.static.local_params import GradientLeaf

__all__ = ["InstalledUnsharding", "UnshardedLocalParam", "install_unsharding"]


class UnshardedLocalParam(UnshardedParam, GradientLeaf):
    """The unsharded parameter of one sharded parameter, as a plain tensor.

    Args:
        owner: a module that has the parameter.
        name: its name there.
        schedule: see `UnshardedParam`.

    Attributes:
        placements: with which modules compute.
    """

    def __init__(self, owner: nn.Module, name: str, schedule: Schedule) -> None:
        super().__init__(owner, name, schedule)
        self.placements = schedule.run
        hollow = torch.empty(self.param.shape, device="meta")
        self._shape = local_shape(hollow, self.param.device_mesh, schedule.run)
        self.refresh()

    @property
    def param(self) -> DTensor:
        """The sharded parameter."""
        return self._sharded_param

    @property
    def grad_target(self) -> torch.Tensor:
        """The leaf in which autograd accumulates the gradient."""
        return self.tensor

    def new_tensor(self) -> torch.Tensor:
        """Returns what modules use: a new plain tensor on the memory."""
        assert self._local is not None
        return self._local.detach()

    def refresh(self) -> None:
        """Renews the leaf if the sharded parameter has another device or dtype than before."""
        local, leaf = self.param._local_tensor, getattr(self, "tensor", None)
        if leaf is None or (leaf.device, leaf.dtype) != (local.device, local.dtype):
            # One element for all: it is never read.
            self.tensor = local.detach().new_empty(()).expand(self._shape)
            self._handle = None
        self.tensor.requires_grad_(self.param.requires_grad)
        if self._handle is None and self._on_gradient is not None:
            self.call_on_gradient(self._on_gradient)


@dataclass(frozen=True)
class InstalledUnsharding:
    """The parameters with phases of a model.

    Attributes:
        params: those that are plain tensors while modules run, by their first names.
        handles: of the hooks that unshard parameters.
    """

    params: dict[str, UnshardedLocalParam]
    handles: tuple[RemovableHandle, ...]


def install_unsharding(model: nn.Module, lowered: Lowered) -> InstalledUnsharding:
    """Makes modules use unsharded parameters, as plain tensors; DTensors in eager fallbacks.

    Args:
        model: its parameters are DTensors; other hooks, which use them, are installed.
        lowered: the plan, lowered for this model.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    params: dict[str, UnshardedLocalParam] = {}

    def make(owner: nn.Module, name: str, schedule: Schedule) -> UnshardedParam:
        first_name = names[id(owner._parameters[name])]
        if lowered.runs_on_dtensors(first_name):
            return UnshardedParam(owner, name, schedule)
        params[first_name] = UnshardedLocalParam(owner, name, schedule)
        return params[first_name]

    handles = use_unsharded_params(model, lowered.schedules, make)
    return InstalledUnsharding(params, tuple(handles))
