"""A part of a model: the same modules under the same names, without those of other stages."""

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn


class PassThrough(nn.Module):
    """Stands where another stage has a unit: hands through what the unit would be given first.

    So a model's own forward runs on any part of it: it finds all its layers, of which some do
    nothing, and what it makes beside them (positions, rotary embeddings, causal masks) it makes
    anew from the shapes.
    """

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return ``hidden_states``."""
        return hidden_states


def model_part(model: nn.Module, keep: Collection[str], absent: Collection[str]) -> nn.Module:
    """Return ``model`` with some units replaced, sharing all other modules with it.

    Parameters keep their names, those of the whole model, and their identity. Modules that hold
    both kinds are copied without what lies below them, hooks included: what is wrapped or hooked
    afterwards is the part's alone.

    Args:
        model: which is left as it is.
        keep: names of units that the part has; the part with the model's first unit has the
            parameters outside of all units too.
        absent: names of units that it has not.
    """
    return _part(model, "", frozenset(absent), owner=_first(model, keep, absent))


def _first(model: nn.Module, keep: Collection[str], absent: Collection[str]) -> bool:
    names = [name for name, _ in model.named_modules() if name in keep or name in absent]
    return names[0] in keep


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
        # Hooks, parameters, buffers and submodules are in dictionaries: each needs its own.
        mine = type(value)(value) if isinstance(value, (dict, OrderedDict)) else value
        object.__setattr__(copy, name, mine)
    return copy
