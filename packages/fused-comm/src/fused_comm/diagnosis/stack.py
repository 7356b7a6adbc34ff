"""Reads stacks: whose code is on them, and which parameters, modules and objects they wait for.

Nothing here runs before a report is made; the frames of a thread are read while it is blocked.
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

__all__ = [
    "CodeLocation", "StackFrame", "frames_of_error", "frames_of_thread", "packages_of", "waits_for",
]  # fmt: skip

_TORCH = Path(torch.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Parts of torch that start collectives by themselves.
_TORCH_PARTS = {
    "distributed/tensor": "DTensor",
    "distributed/fsdp": "FSDP of torch",
    "distributed/pipelining": "pipelining of torch",
    "distributed/checkpoint": "checkpointing of torch",
    "distributed/optim": "distributed optimizers of torch",
    "nn/parallel": "DDP",
}
_MODULE_CALL = (str(_TORCH / "nn/modules/module.py"), "_call_impl")
_REDISTRIBUTE = (str(_TORCH / "distributed/tensor/_redistribute.py"), "redistribute_local_tensor")
_COLLECTIVES = str(_TORCH / "distributed/distributed_c10d.py")
_BACKWARD = (str(_TORCH / "autograd/graph.py"), "_engine_run_backward")


@dataclass(frozen=True)
class CodeLocation:
    """A line of Python.

    Attributes:
        file: the path of its file.
        line: its number.
        function: the function that it is part of.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        location = f"{_path_from_package(self.file)}:{self.line} in {self.function}"
        return f"{location}: {code}" if code else location


@dataclass(frozen=True, eq=False)
class StackFrame:
    """A function that runs, or that an error has ended.

    Attributes:
        frame: Python's frame, with the local variables.
        line: the number of its current line.
    """

    frame: FrameType
    line: int

    @property
    def code(self) -> tuple[str, str]:
        """File and name of the function."""
        return self.frame.f_code.co_filename, self.frame.f_code.co_name

    @property
    def location(self) -> CodeLocation:
        """Its current line."""
        return CodeLocation(self.code[0], self.line, self.code[1])


def frames_of_thread(thread: int) -> list[StackFrame]:
    """Returns a thread's frames, the innermost first; none where the thread has ended."""
    top = sys._current_frames().get(thread)
    return [StackFrame(frame, line) for frame, line in traceback.walk_stack(top)] if top else []


def frames_of_error(error: BaseException) -> list[StackFrame]:
    """Returns the frames that an error and its causes have ended, then those of their callers.

    The innermost comes first.
    """
    found: dict[int, StackFrame] = {}
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in traceback.walk_tb(cause.__traceback__):
            found[id(frame)] = StackFrame(frame, line)  # the line of the cause, which came first
        cause = cause.__cause__
    inner = [*found.values()][::-1]
    outer = inner[-1].frame.f_back if inner else None
    # walk_stack(None) would return the frames of this function's caller.
    return inner + ([StackFrame(*one) for one in traceback.walk_stack(outer)] if outer else [])


def packages_of(locations: Iterable[CodeLocation]) -> tuple[str, ...]:
    """Returns whose code it is, the innermost first: packages, parts of torch, scripts with a line.

    The rest of torch and the standard library are left out.
    """
    found: dict[str, str] = {}
    for location in locations:
        if owner := _owner(location.file):
            found.setdefault(owner, f"{owner}:{location.line}" if owner.endswith(".py") else owner)
    return tuple(found.values())


@cache
def _owner(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(_TORCH):
        inside = path.relative_to(_TORCH)
        return next(
            (name for part, name in _TORCH_PARTS.items() if inside.is_relative_to(part)), ""
        )
    if file.startswith("<frozen") or (
        path.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in path.parts
    ):
        return ""
    folders = [folder for folder in path.parents if (folder / "__init__.py").is_file()]
    return folders[-1].name if folders else path.name


def _path_from_package(file: str) -> str:
    path = Path(file)
    folders = [folder for folder in path.parents if (folder / "__init__.py").is_file()]
    return str(path.relative_to(folders[-1].parent)) if folders else path.name


def waits_for(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    """Returns noun phrases for what a stack waits for, the innermost first.

    These are: the results of ``_waits_for_`` methods; redistributions of DTensors; tensors of a
    collective that are parameters, gradients or buffers of a module on the stack; the module that
    runs; backward.
    """
    found = (phrase for frame in frames for phrase in _phrases(frame, frames))
    return (*dict.fromkeys(found), *_running(frames))


def _phrases(frame: StackFrame, frames: Sequence[StackFrame]) -> Iterator[str]:
    code, variables = frame.code, frame.frame.f_locals
    method = getattr(type(variables.get("self")), "_waits_for_", None)
    if method is not None:
        try:
            yield method(variables["self"])
        except Exception as error:  # the object may be incomplete; the report has to go on
            yield f"{type(variables['self']).__name__}, whose _waits_for_ failed: {error!r}"
    if code == _REDISTRIBUTE:
        src, dst = variables["current_spec"], variables["target_spec"]
        yield (
            f"redistribution of a DTensor of shape {tuple(src.shape)} from {src.placements} to "
            f"{dst.placements} on {src.mesh}"
        )
    if code[0] == _COLLECTIVES:
        names = _tensor_names(frames)
        for value in variables.values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor) and _memory_key(tensor) in names:
                    yield f"{code[1]} of {names[_memory_key(tensor)]}"


def _running(frames: Sequence[StackFrame]) -> Iterator[str]:
    modules = [frame.frame.f_locals["self"] for frame in frames if frame.code == _MODULE_CALL]
    if modules:
        innermost, outermost = modules[0], modules[-1]
        name = next((n for n, module in outermost.named_modules() if module is innermost), "")
        model = type(outermost).__name__
        yield f"module {name!r} of {model}" if name else f"the forward of {model}"
    if any(frame.code == _BACKWARD for frame in frames):
        yield "a backward"


def _tensor_names(frames: Iterable[StackFrame]) -> dict[Any, str]:
    """Names of the tensors of all modules that are local variables of functions outside torch."""
    names: dict[Any, str] = {}
    for frame in frames:
        if not Path(frame.code[0]).is_relative_to(_TORCH):
            for module in frame.frame.f_locals.values():
                if isinstance(module, nn.Module):
                    _add_names(names, module)
    return names


def _add_names(names: dict[Any, str], module: nn.Module) -> None:
    for name, param in module.named_parameters():
        names[_memory_key(param)] = f"parameter {name!r}"
        if param.grad is not None:
            names[_memory_key(param.grad)] = f"the gradient of {name!r}"
    for name, buffer in module.named_buffers():
        names[_memory_key(buffer)] = f"buffer {name!r}"


def _memory_key(tensor: torch.Tensor) -> Any:
    """Identifies the memory of a tensor on this rank; a tensor without memory equals none."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.data_ptr() or object()
    except RuntimeError:  # a fake tensor
        return object()
