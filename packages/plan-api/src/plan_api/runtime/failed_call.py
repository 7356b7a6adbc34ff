"""Finds the module call and the expression in which an error was raised, from its traceback."""

from __future__ import annotations

import ast
import itertools
import linecache
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from plan_api.runtime.error_context import describe_tensors
from plan_api.runtime.hooks import places_of

__all__ = ["Call", "Expression", "ends", "expression_of", "open_calls", "tensors_of"]

_CALLS = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)
# Code that runs operators for others: its expressions say nothing of the model.
_BETWEEN = (
    "torch.distributed", "torch._ops", "torch._C", "torch.overrides", "torch.utils",
    "torch.nn.modules.module", "torch._dynamo", "plan_api", "dtensor_rules", "dist_rng",
)  # fmt: skip
_LONGEST = 120  # characters of an expression


@dataclass(frozen=True)
class Call:
    """A call of a module that has not returned.

    Attributes:
        path: of the module.
        module: itself.
        given: its arguments by name, as hooks have left them.
    """

    path: str
    module: nn.Module
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({type(self.module).__name__})"


@dataclass(frozen=True)
class Expression:
    """What was being computed.

    Attributes:
        line: as ``model.py:12``.
        text: of the source; "" where there is none.
        named: what has tensors in it, by name; where there is no source, all local variables.
        owner: ``self`` there.
        operands: the tensors of the operator that failed; () where torch's code does not tell.
    """

    line: str
    text: str
    named: Mapping[str, Any]
    owner: object
    operands: Sequence[torch.Tensor]

    def __str__(self) -> str:
        at = f"at {self.line}" + f", `{textwrap.shorten(self.text, _LONGEST)}`" * bool(self.text)
        tensors = [f"{name} is {describe_tensors(value)}" for name, value in self.named.items()]
        return f"{at}: {'; '.join(tensors)}" if tensors else at


def ends(error: BaseException, module: nn.Module) -> bool:
    """Whether an error ends a call of this module, rather than an earlier one be handled now."""
    frame = error.__traceback__.tb_frame if error.__traceback__ else None
    return frame is not None and frame.f_code in _CALLS and frame.f_locals["self"] is module


def open_calls(error: BaseException, names: Mapping[nn.Module, str]) -> list[Call]:
    """The calls of modules that an error ended, the innermost last.

    Args:
        error: that has been caught.
        names: of the modules to look for.
    """
    calls: list[Call] = []
    for frame in _frames(error):
        module = frame.f_locals.get("self") if frame.f_code in _CALLS else None
        if not isinstance(module, nn.Module) or module not in names:
            continue
        args, places = frame.f_locals["args"], places_of(module)
        by_place = {
            places[at] if at < len(places) else str(at): value for at, value in enumerate(args)
        }
        if calls and calls[-1].module is module:
            calls.pop()  # its inner frame has the arguments after the hooks
        calls.append(Call(names[module], module, by_place | frame.f_locals["kwargs"]))
    return calls


def expression_of(error: BaseException) -> Expression | None:
    """The innermost expression of code that is the model's, or that of torch's own modules.

    Args:
        error: that has been caught.
    """
    entries = [*_entries(error)]
    own = [at for at, one in enumerate(entries) if not _is_between(one.tb_frame)]
    if not own:
        return None
    entry, below = entries[own[-1]], entries[own[-1] + 1 :]
    frame = entry.tb_frame
    text, scope = _source(entry), frame.f_locals
    tree = _parsed(text)
    named = scope if tree is None else dict(_named(tree, scope))
    operands = (tensors_of(one.tb_frame.f_locals.get("args")) for one in below)
    return Expression(
        f"{Path(frame.f_code.co_filename).name}:{entry.tb_lineno}",
        " ".join(text.split()),
        {name: value for name, value in named.items() if name != "self" and tensors_of(value)},
        scope.get("self"),
        next((found for found in operands if any(isinstance(one, DTensor) for one in found)), ()),
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Those in nested tuples, lists and dicts."""
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (entry.tb_frame for entry in _entries(error))


def _is_between(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return any(name == one or name.startswith(f"{one}.") for one in _BETWEEN)


def _source(entry: TracebackType) -> str:
    """The instruction that failed, as it is written."""
    code = entry.tb_frame.f_code
    where = next(itertools.islice(code.co_positions(), entry.tb_lasti // 2, None), None)
    if where is None or None in where:
        return ""
    first, last, begin, end = where
    lines = [
        linecache.getline(code.co_filename, number, entry.tb_frame.f_globals).encode()
        for number in range(first or 0, (last or 0) + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode()


def _parsed(text: str) -> ast.AST | None:
    try:
        return ast.parse(text) if text else None
    except SyntaxError:  # a part of a statement
        return None


def _named(tree: ast.AST, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables, and attributes of variables, without running any code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield node.id, scope[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            places: list[Mapping[str, Any]] = [getattr(owner, "__dict__", {})]
            if isinstance(owner, nn.Module):
                places += [owner._parameters, owner._buffers]
            for place in places:
                if node.attr in place:
                    yield f"{node.value.id}.{node.attr}", place[node.attr]
