"""Initializers that are called after `parallelize` find DTensors, as in Eager.

A module's `reset_parameters` draws the numbers of the tensors that it finds: of local parameters it
would draw this rank's shards, from fan-ins of a shard. So while such a method runs, modules find
their DTensor parameters, of which dist-rng draws the numbers of one device; and the functions of
`torch.nn.init` take the DTensor of a local parameter that a script passes to them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from plan_api.static.local_params import LocalParam

__all__ = ["install_initializers", "use_initializers"]

# Methods that initialize parameters: of torch's modules, of transformers' and of scripts.
_METHODS = (
    "apply", "reset_parameters", "_reset_parameters", "init_weights", "_init_weights",
    "initialize_weights", "_initialize_weights",
)  # fmt: skip
_FUNCTIONS = (
    "uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "eye_", "dirac_",
    "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_",
    "sparse_", "_calculate_fan_in_and_fan_out",
)  # fmt: skip

_local_params: weakref.WeakSet[LocalParam] = weakref.WeakSet()


def install_initializers(
    model: nn.Module, local_params: Sequence[LocalParam]
) -> list[RemovableHandle]:
    """Makes modules find DTensors while their initializers run.

    Args:
        model: in static mode.
        local_params: the model's.
    """
    _local_params.update(local_params)
    wrapped = [
        (module, name)
        for module in model.modules()
        for name in _METHODS
        if callable(getattr(type(module), name, None))
    ]
    for module, name in wrapped:
        module.__dict__[name] = _with_dtensors(module, name, local_params)
    return [_InstanceMethods(wrapped)]


def use_initializers() -> Callable[[], None]:
    """Replaces functions of `torch.nn.init` where they take a local parameter.

    Returns:
        the inverse, which leaves functions that others have put there since.
    """
    replaced = [(name, getattr(nn.init, name)) for name in _FUNCTIONS]
    replacements = {name: _of_dtensor(native) for name, native in replaced}
    for name, replacement in replacements.items():
        setattr(nn.init, name, replacement)

    def restore() -> None:
        for name, native in replaced:
            if getattr(nn.init, name) is replacements[name]:
                setattr(nn.init, name, native)

    return restore


class _InstanceMethods(RemovableHandle):
    """Removes attributes of modules that replace methods of their classes."""

    def __init__(self, methods: Iterable[tuple[nn.Module, str]]) -> None:
        self._methods = [(weakref.ref(module), name) for module, name in methods]

    def remove(self) -> None:
        """Removes the attributes."""
        for reference, name in self._methods:
            if (module := reference()) is not None:
                module.__dict__.pop(name, None)


def _with_dtensors(
    module: nn.Module, name: str, local_params: Sequence[LocalParam]
) -> Callable[..., Any]:
    method, reference = getattr(type(module), name), weakref.ref(module)  # no cycle

    def call(*args: Any, **kwargs: Any) -> Any:
        with _hidden(local_params):
            return method(reference(), *args, **kwargs)

    return call


@contextmanager
def _hidden(local_params: Sequence[LocalParam]) -> Iterator[None]:
    """Lets modules find DTensors inside of the block; those that they find now anyway stay."""
    shown = [local_param for local_param in local_params if local_param.is_shown]
    for local_param in shown:
        local_param.hide()
    try:
        yield
    finally:
        for local_param in shown:
            local_param.show()


def _of_dtensor(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def replacement(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        param = next((one.param for one in _local_params if one.tensor is tensor), None)
        if param is None:
            return native(tensor, *args, **kwargs)
        result = native(param, *args, **kwargs)
        return tensor if result is param else result

    return replacement
