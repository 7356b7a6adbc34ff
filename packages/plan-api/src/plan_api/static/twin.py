"""A second module tree over the same parameters, on which Eager runs beside static mode."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["twin_of"]

_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def twin_of(
    model: nn.Module, replaced: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> nn.Module:
    """Modules of the same classes and attributes, without hooks and compiled code.

    Args:
        model: any; it is not changed.
        replaced: gives the twin's tensor for each parameter and buffer, once for tied ones; by
            default the same.

    Returns:
        the twin, which has the model's structure: what occurs twice in it does so in the twin.
    """
    made: dict[int, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def tensor(old: torch.Tensor | None) -> torch.Tensor | None:
        if old is None or replaced is None:
            return old
        if id(old) not in tensors:
            tensors[id(old)] = replaced(old)
        return tensors[id(old)]

    def twin(module: nn.Module) -> nn.Module:
        while isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        if id(module) in made:
            return made[id(module)]
        new = made[id(module)] = copy.copy(module)
        own: dict[str, Any] = new.__dict__
        for name, param in module._parameters.items():
            own.pop(name, None)  # a leaf
            own["_parameters"] = {**own["_parameters"], name: tensor(param)}
        for name, buffer in module._buffers.items():
            own.pop(name, None)
            own["_buffers"] = {**own["_buffers"], name: tensor(buffer)}
        own["_modules"] = {
            name: None if child is None else twin(child) for name, child in module._modules.items()
        }
        own.update((name, OrderedDict()) for name in _HOOKS if name in own)
        own["_compiled_call_impl"] = None
        for name, value in [*own.items()]:
            if isinstance(value, types.MethodType) and value.__self__ is module:
                own[name] = types.MethodType(value.__func__, new)
        return new

    return twin(model)
