"""What modules use of parameters in static mode: this rank's part, as a plain tensor.

Note: a parameter's *leaf* shares the memory of its local tensor, and autograd's gradients come to
it. Modules find leaves before they find parameters, which stay DTensors where optimizers and
checkpoints look: in `named_parameters` and `state_dict`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.model_names import named_state

__all__ = ["Leaf", "leaves_of"]


class Leaf:
    """Of one parameter, or of a buffer that is cut.

    Args:
        name: the first of the tensor.
        users: the modules that have it, with its name there; the first is asked for it.
        shown: whether modules find the leaf; else they find the parameter, and only optimizers are
            lent the leaf.

    Attributes:
        param: the DTensor.
        tensor: the leaf.
    """

    param: Any
    tensor: torch.Tensor

    def __init__(self, name: str, users: list[tuple[nn.Module, str]], shown: bool = True) -> None:
        self.name, self.shown = name, shown
        # Not to keep a model that nobody else has.
        self._users = [(weakref.ref(module), own) for module, own in users]
        self._source: torch.Tensor | None = None
        self._needed = False  # a gradient, ever
        self._told: Callable[[], None] | None = None
        self._handle: RemovableHandle | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Makes a new leaf if the parameter is another one, or its memory elsewhere, by now.

        Raises:
            ValueError: it was tied, and is no longer.

        Returns:
            whether gradients are to be reduced anew: it has another identity or dtype, or needs one
            for the first time.
        """
        owner, own = self._users[0][0](), self._users[0][1]
        if owner is None:
            return False
        param = _registry(owner, own)[own]
        local, needs = param._local_tensor, param.requires_grad
        if local is self._source and needs == self.tensor.requires_grad:
            return False
        if any(_registry(module, name)[name] is not param for module, name in self._alive()):
            raise ValueError(
                f"{self.name} was tied to a parameter that is another one by now, as after "
                f"load_state_dict(assign=True): load without assign, which keeps them tied"
            )
        renewed = self._source is not None and (
            param is not self.param
            or local.dtype != self.tensor.dtype
            or (needs and not self._needed)
        )
        self.param, self._source, self._needed = param, local, self._needed or needs
        self.tensor = local.detach().requires_grad_(needs)
        self.show()
        if self._told is not None:
            self.tell(self._told)
        return renewed

    def show(self) -> None:
        """Modules find the leaf from now on; on meta the parameter, for initialisers."""
        if self.tensor.is_meta or not self.shown:
            self.hide()
            return
        for module, own in self._alive():
            module.__dict__[own] = self.tensor

    def hide(self) -> None:
        """Modules find the parameter from now on."""
        for module, own in self._alive():
            module.__dict__.pop(own, None)

    def _alive(self) -> Iterator[tuple[nn.Module, str]]:
        for reference, own in self._users:
            if (module := reference()) is not None:
                yield module, own

    def tell(self, told: Callable[[], None]) -> None:
        """Calls a function whenever backward has accumulated a gradient in the leaf."""
        if self._handle is not None:
            self._handle.remove()
        self._told = told
        if not self.tensor.requires_grad:
            return
        # Autograd has hooks where the garbage collector does not look: they must not keep this.
        reference = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            if (alive := reference()) is not None and (told := alive._told) is not None:
                told()

        self._handle = self.tensor.register_post_accumulate_grad_hook(hook)

    def remove(self) -> None:
        """Modules find the parameter, and nobody is told any more."""
        self.hide()
        if self._handle is not None:
            self._handle.remove()
        self._told = None


def leaves_of(model: nn.Module, stays: Callable[[str], bool]) -> list[Leaf]:
    """Leaves for all parameters and cut buffers of a model of DTensors, which modules find at once.

    Buffers that are whole become plain tensors: modules may replace them while they run.

    Args:
        model: of DTensors.
        stays: whether modules find the DTensor of a name.
    """
    users: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for name, tensor in list(named_state(model)):
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own in module._buffers and stays(name):
            continue
        if own in module._buffers and _is_whole(tensor):
            module._buffers[own] = tensor._local_tensor  # type: ignore[attr-defined]
        elif isinstance(tensor, DTensor):
            users.setdefault(id(tensor), (name, []))[1].append((module, own))
    return [Leaf(name, modules, not stays(name)) for name, modules in users.values()]


def _registry(module: nn.Module, own: str) -> Any:
    return module._parameters if own in module._parameters else module._buffers


def _is_whole(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and all(one.is_replicate() for one in tensor.placements)
