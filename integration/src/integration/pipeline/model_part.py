"""Makes the part of a model on a stage: the same modules and names, without other stages' units."""

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn


class PassThrough(nn.Module):
    """Replaces a unit of another stage, and returns the unit's first argument.

    The model's own forward thus runs on any part of it: replaced layers do nothing, and positions,
    rotary embeddings and causal masks are computed on every stage from the shapes.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns ``hidden_states``."""
        return hidden_states


def model_part(model: nn.Module, present: Collection[str], absent: Collection[str]) -> nn.Module:
    """Returns ``model`` with some units replaced, sharing all other modules with it.

    Parameters have the same names as in ``model`` and are the same objects. Modules that contain
    replaced units are copied shallowly, with their hooks, so that wrapping or hooking the part
    does not change ``model``.

    Args:
        model: the full model, which is not changed.
        present: names of the part's units; the part with the model's first unit also has the
            parameters outside of all units.
        absent: names of the units to replace.
    """
    return _part(model, "", frozenset(absent), owner=_has_first_unit(model, present, absent))


def _has_first_unit(model: nn.Module, present: Collection[str], absent: Collection[str]) -> bool:
    names = [name for name, _ in model.named_modules() if name in present or name in absent]
    return names[0] in present


def _part(module: nn.Module, name: str, absent: frozenset[str], *, owner: bool) -> nn.Module:
    if name in absent:
        return PassThrough()
    below = f"{name}." if name else ""
    if not any(unit.startswith(below) for unit in absent):
        return module
    copy = _shallow(module)
    if not owner:
        copy._parameters = dict.fromkeys(module._parameters)
    for child, submodule in module.named_children():
        copy._modules[child] = _part(submodule, below + child, absent, owner=owner)
    return copy


def _shallow(module: nn.Module) -> nn.Module:
    copy: nn.Module = type(module).__new__(type(module))
    for name, value in vars(module).items():
        # Hooks, parameters, buffers and submodules are in dictionaries, which are copied.
        own = type(value)(value) if isinstance(value, (dict, OrderedDict)) else value
        object.__setattr__(copy, name, own)
    return copy
