"""Which modules stay on DTensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn

from plan_api.spec.path import generalize_numbers

__all__ = ["around", "widened"]


def around(site: str, model: nn.Module, staying: Collection[str]) -> str | None:
    """The smallest modules that are to stay, and do not yet, as a pattern; None: the model itself.

    Args:
        site: where static mode goes wrong: a module, or a parameter.
        model: whose they are.
        staying: patterns of modules that stay.
    """
    modules = dict(model.named_modules())
    parts = site.split(".")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        if path not in modules or not _runs(modules[path]):
            continue
        pattern = generalize_numbers(path)
        if not any(re.match(rf"{one}(?:\.|$)", path) for one in staying):
            return pattern
    return None


def widened(staying: Mapping[str, str], wider: str, reason: str) -> dict[str, str]:
    """The patterns of modules that stay, when those of one more do.

    Args:
        staying: what goes wrong without, by pattern.
        wider: the pattern; what is inside of it is said no more.
        reason: what goes wrong without, if nothing inside has said it first.
    """
    inside = [one for one in staying if one.startswith(rf"{wider}\.")]
    left = {one: told for one, told in staying.items() if one not in inside}
    return left | {wider: staying[inside[0]] if inside else reason}


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward: a list of modules has none."""
    return type(module).forward is not nn.Module.forward
