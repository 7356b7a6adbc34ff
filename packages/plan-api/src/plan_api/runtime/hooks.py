"""Sites as hooks of torch's modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.fuse import Site
from plan_api.lowering.ir import Moment
from plan_api.runtime.containers import map_tensors, replace_part
from plan_api.runtime.error_context import append_site

__all__ = [
    "Fired", "Moves", "argument_at", "given_at", "install", "places_of", "replaced_at",
]  # fmt: skip


class Fired:
    """Which sites have been passed since `parallelize`."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._waiting = {(site.path, site.moment): site for site in sites}

    def pass_(self, site: Site) -> None:
        """Remembers that a site was passed."""
        self._waiting.pop((site.path, site.moment), None)

    @property
    def never(self) -> list[Site]:
        """Those that were not."""
        return list(self._waiting.values())


class Moves(Protocol):
    """What a hook does with each tensor of one part of what passes."""

    # The last spec of a DTensor that stayed as it was. Torch gives the same object to the same
    # operator's result again, so hooks look at this first.
    settled: DTensorSpec | None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it should be; itself if it is that."""


def install(
    site: Site, module: nn.Module, movers: Sequence[tuple[int | str, Moves]], fired: Fired
) -> RemovableHandle:
    """Registers one hook that does all that a site asks for.

    Args:
        site: with activations only.
        module: the site's.
        movers: of the site's steps, with what each is of.
        fired: is told when the hook runs for the first time.
    """
    if site.moment is Moment.FORWARD_PRE:
        places = places_of(module)
        arguments = [(*argument_at(index, places), mover) for index, mover in movers]
        return module.register_forward_pre_hook(_pre_hook(site, arguments, fired), with_kwargs=True)
    return module.register_forward_hook(_post_hook(site, movers, fired))


# An argument by place and by name, for it may be given by either, and what is done with it: exact
# tuples, which a loop takes apart fastest.
_Argument: TypeAlias = tuple[int, str, Moves]


def places_of(module: nn.Module) -> list[str]:
    """The names of arguments that may be given by place."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


def argument_at(index: int | str, places: Sequence[str]) -> tuple[int, str]:
    """The place of an argument, and its name.

    Args:
        index: of an operation.
        places: as `places_of` gives them.
    """
    if isinstance(index, str):
        return sys.maxsize, index
    return index, places[index] if index < len(places) else ""


def given_at(argument: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module was given there, by place or by name; None if nothing."""
    place, name = argument
    return args[place] if place < len(args) else kwargs.get(name)


def replaced_at(
    argument: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another one there, if one was given."""
    place, name = argument
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value} if name in kwargs else kwargs


def _pre_hook(site: Site, movers: Sequence[_Argument], fired: Fired) -> Callable[..., Any]:
    seen = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            fired.pass_(site)
        changed = False
        for place, name, mover in movers:
            if place < len(args):
                old = args[place]
            elif name in kwargs:
                old = kwargs[name]
            else:
                continue
            if type(old) is DTensor and old._spec is mover.settled:
                continue
            try:
                new = map_tensors(old, mover)
            except Exception as error:
                append_site(error, site, (place, name), old)
                raise
            if new is old:
                continue
            changed = True
            if place < len(args):
                args = (*args[:place], new, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: new}
        return (args, kwargs) if changed else None

    return hook


def _post_hook(
    site: Site, movers: Sequence[tuple[int | str, Moves]], fired: Fired
) -> Callable[..., Any]:
    seen = False

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            fired.pass_(site)
        moved = output
        for index, mover in movers:
            if type(moved) is DTensor and moved._spec is mover.settled and index == 0:
                continue
            try:
                moved = replace_part(moved, index, mover, site.name)
            except Exception as error:
                append_site(error, site, (index,), moved)
                raise
        return moved

    return hook
