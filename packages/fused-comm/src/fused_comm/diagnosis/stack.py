"""Whose code is on a stack: packages, modules, parameters, and objects that say what they wait for.

Nothing here runs before somebody asks; frames of another thread are read while it stands still.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["Level", "Place", "behind", "levels_of_error", "levels_of_thread", "packages"]

_TORCH = Path(torch.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Parts of torch that start collectives of their own accord.
_PARTS = {
    "distributed/tensor": "DTensor",
    "distributed/fsdp": "FSDP of torch",
    "distributed/pipelining": "pipelining of torch",
    "distributed/checkpoint": "checkpointing of torch",
    "distributed/optim": "distributed optimizers of torch",
    "nn/parallel": "DDP",
}
_CALLS_MODULE = (str(_TORCH / "nn/modules/module.py"), "_call_impl")
_REDISTRIBUTES = (str(_TORCH / "distributed/tensor/_redistribute.py"), "redistribute_local_tensor")
_COLLECTIVES = str(_TORCH / "distributed/distributed_c10d.py")
_BACKWARD = (str(_TORCH / "autograd/graph.py"), "_engine_run_backward")


@dataclass(frozen=True)
class Place:
    """A line of code.

    Attributes:
        file: its path.
        line: its number.
        function: that it is in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        said = linecache.getline(self.file, self.line).strip()
        return f"{_short(self.file)}:{self.line} in {self.function}" + (f": {said}" * bool(said))


@dataclass(frozen=True, eq=False)
class Level:
    """A function that runs, or that an error has ended.

    Attributes:
        frame: with its local variables.
        line: that it is at.
    """

    frame: FrameType
    line: int

    @property
    def code(self) -> tuple[str, str]:
        """File and name of the function."""
        return self.frame.f_code.co_filename, self.frame.f_code.co_name

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.code[0], self.line, self.code[1])


def levels_of_thread(thread: int) -> list[Level]:
    """What a thread of this process does, the innermost first; nothing of one that has ended."""
    top = sys._current_frames().get(thread)
    return [Level(frame, line) for frame, line in traceback.walk_stack(top)] if top else []


def levels_of_error(error: BaseException) -> list[Level]:
    """What an error and its causes have ended, and what waits for that, the innermost first."""
    found: dict[int, Level] = {}
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in traceback.walk_tb(cause.__traceback__):
            found[id(frame)] = Level(frame, line)  # of the cause, which was first
        cause = cause.__cause__
    inner = [*found.values()][::-1]
    outer = inner[-1].frame.f_back if inner else None
    # walk_stack(None) would walk the caller's.
    return inner + ([Level(*one) for one in traceback.walk_stack(outer)] if outer else [])


def packages(places: Iterable[Place]) -> tuple[str, ...]:
    """Whose code it is, the innermost first: packages, parts of torch, scripts at a line.

    torch itself and the standard library are left out.
    """
    found: dict[str, str] = {}
    for place in places:
        if owner := _owner(place.file):
            found.setdefault(owner, f"{owner}:{place.line}" if owner.endswith(".py") else owner)
    return tuple(found.values())


@cache
def _owner(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(_TORCH):
        within = path.relative_to(_TORCH)
        return next((name for part, name in _PARTS.items() if within.is_relative_to(part)), "")
    if file.startswith("<frozen") or (
        path.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in path.parts
    ):
        return ""
    folders = [folder for folder in path.parents if (folder / "__init__.py").is_file()]
    return folders[-1].name if folders else path.name


def _short(file: str) -> str:
    """A path from its package on."""
    path = Path(file)
    folders = [folder for folder in path.parents if (folder / "__init__.py").is_file()]
    return str(path.relative_to(folders[-1].parent)) if folders else path.name


def behind(levels: Sequence[Level]) -> tuple[str, ...]:
    """What a stack says of what it is there for, the innermost first, each a sentence without end.

    Objects that have ``_waits_for_``; redistributions of DTensors; tensors of a collective that are
    parameters, gradients or buffers of modules in sight; the module that runs; backward.
    """
    said = (sentence for level in levels for sentence in _sentences(level, levels))
    return (*dict.fromkeys(said), *_running(levels))


def _sentences(level: Level, levels: Sequence[Level]) -> Iterator[str]:
    code, seen = level.code, level.frame.f_locals
    asked = getattr(type(seen.get("self")), "_waits_for_", None)
    if asked is not None:
        try:
            yield asked(seen["self"])
        except Exception as error:  # what stands still may be half made; the rest has to be told
            yield f"{type(seen['self']).__name__}, which cannot say more: {error!r}"
    if code == _REDISTRIBUTES:
        src, dst = seen["current_spec"], seen["target_spec"]
        yield (
            f"redistribution of a DTensor of shape {tuple(src.shape)} from {src.placements} to "
            f"{dst.placements} on {src.mesh}"
        )
    if code[0] == _COLLECTIVES:
        names = _names(levels)
        for value in seen.values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor) and _key(tensor) in names:
                    yield f"{code[1]} of {names[_key(tensor)]}"


def _running(levels: Sequence[Level]) -> Iterator[str]:
    modules = [level.frame.f_locals["self"] for level in levels if level.code == _CALLS_MODULE]
    if modules:
        innermost, outermost = modules[0], modules[-1]
        name = next((n for n, one in outermost.named_modules() if one is innermost), "")
        whole = type(outermost).__name__
        yield f"module {name!r} of {whole}" if name else f"the forward of {whole}"
    if any(level.code == _BACKWARD for level in levels):
        yield "a backward"


def _names(levels: Iterable[Level]) -> dict[Any, str]:
    """Of tensors of all modules that are locals of functions that are not torch's."""
    names: dict[Any, str] = {}
    for level in levels:
        if not Path(level.code[0]).is_relative_to(_TORCH):
            for module in level.frame.f_locals.values():
                if isinstance(module, nn.Module):
                    _add_names(names, module)
    return names


def _add_names(names: dict[Any, str], module: nn.Module) -> None:
    for name, param in module.named_parameters():
        names[_key(param)] = f"parameter {name!r}"
        if param.grad is not None:
            names[_key(param.grad)] = f"the gradient of {name!r}"
    for name, buffer in module.named_buffers():
        names[_key(buffer)] = f"buffer {name!r}"


def _key(tensor: torch.Tensor) -> Any:
    """Of the memory that a tensor has on this rank; each time another where it has none."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.data_ptr() or object()
    except RuntimeError:  # a fake tensor
        return object()
