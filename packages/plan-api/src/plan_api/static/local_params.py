"""Local parameters: what modules use in place of DTensor parameters in static mode.

Note: a *local parameter* is a plain leaf tensor that shares the memory of a parameter's local
tensor, and receives autograd's gradients. It is an attribute in the ``__dict__`` of its modules,
which Python looks up before `nn.Module.__getattr__`. The parameters themselves stay DTensors where
optimizers and checkpoints look: in `named_parameters` and `state_dict`.

fully_shard itself replaces its parameters by plain tensors while modules run, and a parameter with
phases is unsharded then, so the local parameter of such a DTensor is for optimizers only. The
gradient has the shape of the unsharded local tensor, so autograd accumulates it in a leaf of that
shape, from which `plan_api.static.gradients` moves it to the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import Lowered, Schedule
from plan_api.lowering.model_names import named_state
from plan_api.runtime.local_shards import local_shape
from plan_api.runtime.state import use_unsharded_params
from plan_api.runtime.unsharded_param import UnshardedParam

__all__ = [
    "GradientLeaf", "InstalledUnsharding", "LocalParam", "UnshardedLocalParam",
    "create_local_params", "install_unsharding", "refresh_local_params",
]  # fmt: skip


class GradientLeaf:
    """Has a leaf tensor in which autograd accumulates the gradient of one parameter.

    Attributes:
        tensor: the leaf.
    """

    tensor: torch.Tensor
    _hook: Callable[[torch.Tensor], None] | None = None
    _handle: RemovableHandle | None = None

    def call_on_gradient(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Calls a function each time backward has accumulated a gradient in the leaf.

        Args:
            hook: called with the leaf's tensor. Autograd holds it where the garbage collector does
                not look, so it must hold neither the leaf nor the model.
        """
        if self._handle is not None:
            self._handle.remove()
        self._hook = hook
        if self.tensor.requires_grad:
            self._handle = self.tensor.register_post_accumulate_grad_hook(hook)

    def remove(self) -> None:
        """Removes the gradient hook."""
        if self._handle is not None:
            self._handle.remove()
        self._hook = None


class LocalParam(GradientLeaf):
    """The local parameter of one parameter, or of a sharded buffer.

    Args:
        name: the first name of the parameter.
        users: the modules that have the parameter, each with its name there; the first one is
            asked for the current parameter.
        visible: whether modules find the local parameter; otherwise they find the DTensor, and
            only optimizers use the local parameter.

    Attributes:
        param: the DTensor.
        tensor: the local parameter.
        found_in: the module's dict in which the parameter was found, and its name there.
        source: the local tensor of the parameter, whose memory the local parameter shares.
    """

    param: Any
    source: torch.Tensor | None = None
    found_in: tuple[dict[str, Any], str]

    def __init__(self, name: str, users: list[tuple[nn.Module, str]], visible: bool = True) -> None:
        self.name, self.visible = name, visible
        # Weak references: this must not keep a model alive.
        self._users = [(weakref.ref(module), attribute) for module, attribute in users]
        self._required_grad = False  # ever
        self.refresh()

    def refresh(self) -> bool:
        """Renews the local parameter if the parameter, or its local tensor, has been replaced.

        Raises:
            ValueError: the parameter was tied, and is no longer.

        Returns:
            whether the hooks that reduce gradients have to be registered again: the parameter is
            another object, has another dtype, or requires a gradient for the first time.
        """
        owner, attribute = self._users[0][0](), self._users[0][1]
        if owner is None:
            return False
        registry = _registry(owner, attribute)
        param = registry[attribute]
        if not isinstance(param, DTensor):  # gathered by fully_shard, and not replaced
            return False
        local, requires_grad = param._local_tensor, param.requires_grad
        if any(_registry(module, name)[name] is not param for module, name in self._alive_users()):
            raise ValueError(
                f"{self.name} was tied to a parameter that has been replaced since, as by "
                f"load_state_dict(assign=True): load without assign, which keeps them tied"
            )
        renewed = self.source is not None and (
            param is not self.param
            or local.dtype != self.tensor.dtype
            or (requires_grad and not self._required_grad)
        )
        self.param, self.source, self.found_in = param, local, (registry, attribute)
        self._required_grad = self._required_grad or requires_grad
        self.tensor = local.detach().requires_grad_(requires_grad)
        self.show()
        if self._hook is not None:
            self.call_on_gradient(self._hook)
        return renewed

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements with which modules compute."""
        found: tuple[Placement, ...] = self.param.placements
        return found

    @property
    def is_current(self) -> bool:
        """Whether the local parameter shares the memory that its parameter has now."""
        return self.source is self.param._local_tensor

    @property
    def is_shown(self) -> bool:
        """Whether modules find the local parameter."""
        return any(module.__dict__.get(name) is self.tensor for module, name in self._alive_users())

    def show(self) -> None:
        """Lets modules find the local parameter; on ``meta`` the parameter, for initialisers."""
        if self.tensor.is_meta or not self.visible:
            self.hide()
            return
        for module, attribute in self._alive_users():
            module.__dict__[attribute] = self.tensor

    def hide(self) -> None:
        """Lets modules find the parameter."""
        for module, attribute in self._alive_users():
            module.__dict__.pop(attribute, None)

    def remove(self) -> None:
        """Lets modules find the parameter, and removes the gradient hook."""
        self.hide()
        super().remove()

    def _alive_users(self) -> Iterator[tuple[nn.Module, str]]:
        for reference, attribute in self._users:
            if (module := reference()) is not None:
                yield module, attribute


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
        if self._handle is None and self._hook is not None:
            self.call_on_gradient(self._hook)


@dataclass(frozen=True)
class InstalledUnsharding:
    """The parameters with phases of a model.

    Attributes:
        params: those that are plain tensors while modules run, by their first names.
        handles: of the hooks that unshard parameters.
    """

    params: dict[str, UnshardedLocalParam]
    handles: tuple[RemovableHandle, ...]


def create_local_params(
    model: nn.Module,
    stays: Callable[[str], bool],
    fully_sharded: Collection[str],
    with_phases: Collection[str] = (),
) -> list[LocalParam]:
    """Creates local parameters for all parameters and sharded buffers of a model.

    Modules find them from then on, except for those that are unsharded while modules run.
    Replicated buffers become plain tensors, which modules may replace while they run.

    Args:
        model: its parameters and buffers are DTensors.
        stays: whether modules keep finding the DTensor of this name (an eager fallback).
        fully_sharded: the first names of the parameters that fully_shard manages. It replaces those
            of eager fallbacks by DTensors, and they have no local parameter.
        with_phases: the first names of the parameters that hooks of the plan unshard.
    """
    unsharded = {*fully_sharded, *with_phases}
    users: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for name, tensor in list(named_state(model)):
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if attribute in module._buffers and stays(name):
            continue
        if attribute in module._buffers and _is_replicated(tensor):
            module._buffers[attribute] = tensor._local_tensor  # type: ignore[attr-defined]
        elif isinstance(tensor, DTensor):
            users.setdefault(id(tensor), (name, []))[1].append((module, attribute))
    return [
        LocalParam(name, modules, not stays(name) and name not in unsharded)
        for name, modules in users.values()
        if not (stays(name) and name in fully_sharded)
    ]


def refresh_local_params(local_params: Iterable[LocalParam]) -> bool:
    """Renews the local parameters whose parameter, or its local tensor, has been replaced.

    Raises:
        ValueError: see `LocalParam.refresh`.

    Returns:
        whether the hooks that reduce gradients have to be registered again.
    """
    renewed = False
    for one in local_params:
        (registry, attribute), param = one.found_in, one.param
        # Here, and not in a method: this is before every forward, for all parameters.
        if (
            registry[attribute] is not param
            or param._local_tensor is not one.source
            or param.requires_grad != one.tensor.requires_grad
        ):
            renewed |= one.refresh()
    return renewed


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


def _registry(module: nn.Module, attribute: str) -> Any:
    return module._parameters if attribute in module._parameters else module._buffers


def _is_replicated(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and all(
        placement.is_replicate() for placement in tensor.placements
    )
