"""Sites as hooks of torch's modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from plan_api.containers import map_tensors, replace_part
from plan_api.fuse import Site
from plan_api.ir import Moment
from plan_api.move import Mover

__all__ = ["Fired", "install"]


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


def install(site: Site, module: nn.Module, mesh: DeviceMesh, fired: Fired) -> RemovableHandle:
    """Registers one hook that does all that a site asks for.

    Args:
        site: with activations only.
        module: the site's.
        mesh: the plan's.
        fired: is told when the hook runs for the first time.
    """
    name = f"{site.path}.{site.moment.value}" if site.path else site.moment.value
    movers = [(step.index, Mover(step, mesh, name)) for step in site.steps]
    if site.moment is Moment.FORWARD_PRE:
        places = _places(module)
        chosen = [(_chosen(index, places), mover) for index, mover in movers]
        return module.register_forward_pre_hook(_pre_hook(site, chosen, fired), with_kwargs=True)
    return module.register_forward_hook(_post_hook(site, name, movers, fired))


@dataclass(frozen=True)
class _Argument:
    """An argument by place and name: it may be given by either."""

    place: int
    name: str


def _places(module: nn.Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


def _chosen(index: int | str, places: Sequence[str]) -> _Argument:
    if isinstance(index, str):
        return _Argument(sys.maxsize, index)
    return _Argument(index, places[index] if index < len(places) else "")


def _pre_hook(
    site: Site, movers: Sequence[tuple[_Argument, Mover]], fired: Fired
) -> Callable[..., Any]:
    seen = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            fired.pass_(site)
        for argument, mover in movers:
            place, name = argument.place, argument.name
            if place < len(args):
                old = args[place]
                if (new := map_tensors(old, mover)) is not old:
                    args = (*args[:place], new, *args[place + 1 :])
            elif name in kwargs:
                old = kwargs[name]
                if (new := map_tensors(old, mover)) is not old:
                    kwargs = {**kwargs, name: new}
        return args, kwargs

    return hook


def _post_hook(
    site: Site, name: str, movers: Sequence[tuple[int | str, Mover]], fired: Fired
) -> Callable[..., Any]:
    seen = False

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            fired.pass_(site)
        for index, mover in movers:
            output = replace_part(output, index, mover, name)
        return output

    return hook
