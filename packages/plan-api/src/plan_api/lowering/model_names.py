"""The names of a model's modules, tensors and forward arguments."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

__all__ = [
    "argument_slot", "is_inside", "named_state", "positional_names", "resolve_argument",
    "suggest_names",
]  # fmt: skip


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers under all their names; a tied tensor appears under each."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def is_inside(path: str, module: str) -> bool:
    """Whether a path names a module, or something inside it."""
    return not module or path == module or path.startswith(f"{module}.")


def positional_names(module: nn.Module) -> list[str]:
    """Returns the names of a forward's arguments that can be passed by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def argument_slot(index: int | str, positional: Sequence[str]) -> tuple[int, str]:
    """Returns an argument's position and name; of a keyword-only one, an unreachable position.

    Args:
        index: of an operation.
        positional: as `positional_names` returns them.
    """
    if isinstance(index, str):
        return sys.maxsize, index
    return index, positional[index] if index < len(positional) else ""


def resolve_argument(description: str, name: str, module: nn.Module, index: int | str) -> int | str:
    """Finds an argument of a module's forward.

    Args:
        description: of the entry that names it, for messages.
        name: of the module.
        module: the module.
        index: the position or the name of the argument.

    Returns:
        its position, or its name if it can be passed by keyword only.

    Raises:
        ValueError: forward has no such argument.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    forward = f"forward of {name or 'the model'} ({type(module).__name__})"
    if isinstance(index, int):
        if index >= len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(
                f"{description}: {forward} has {len(positional)} arguments: {', '.join(positional)}"
            )
        return index
    if index in positional:
        return positional.index(index)
    keyword = [
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    ]
    if index in keyword or inspect.Parameter.VAR_KEYWORD in kinds:
        return index
    raise ValueError(
        f"{description}: {forward} has no argument "
        f"{index!r}{suggest_names(index, [*positional, *keyword])}"
    )


def suggest_names(requested: str, names: Iterable[str]) -> str:
    """Formats the names nearest to a requested one as a question; "" if none is near."""
    nearest: dict[str, tuple[float, str]] = {}  # one of the layers that differ by number only
    for name in filter(None, names):
        found, form = (_similarity(requested, name), name), re.sub(r"\d+", "0", name)
        if form not in nearest or found[0] > nearest[form][0]:
            nearest[form] = found
    best = max((similarity for similarity, _ in nearest.values()), default=0.0)
    ranked = sorted(nearest.values(), key=lambda found: -found[0])
    close = [name for similarity, name in ranked if similarity >= max(0.6, best - 0.1)][:3]
    if not close:
        tails: dict[str, str] = {}
        for _, name in nearest.values():
            tails.setdefault(name.rpartition(".")[2], name)
        last = requested.rpartition(".")[2]
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, 3, 0.6)]
    return "; did you mean " + " or ".join(map(repr, close)) + "?" if close else ""


def _similarity(requested: str, name: str) -> float:
    """Compares two names, 0 to 1: the mean over their parts if both have as many parts.

    Compared as one string, a wrong number would cost one character and a typo several.
    """
    parts, others = requested.split("."), name.split(".")
    if len(parts) != len(others):
        parts, others = [requested], [name]
    ratios = [
        difflib.SequenceMatcher(None, part, other).ratio()
        for part, other in zip(parts, others, strict=True)
    ]
    return sum(ratios) / len(ratios)
