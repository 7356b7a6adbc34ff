"""Finds the module call and the expression that raised an error, from its traceback."""

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

from plan_api.lowering.model_names import positional_names
from plan_api.runtime.error_context import describe_tensors

__all__ = [
    "FailedExpression",
    "ModuleCall",
    "ends_call_of",
    "expression_of",
    "tensors_of",
    "unfinished_calls",
]

_CALLS = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)
# Code that runs operators on behalf of the model: its expressions do not describe the model.
_DISPATCH_MODULES = (
    "torch.distributed", "torch._ops", "torch._C", "torch.overrides", "torch.utils",
    "torch.nn.modules.module", "torch._dynamo",
    "plan_api", "dtensor_rules", "dist_rng", "ragged_shard",
)  # fmt: skip
_MAX_LENGTH = 120  # characters of an expression


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module that has not returned.

    Attributes:
        path: of the module.
        module: the module.
        arguments: by name, after the hooks.
    """

    path: str
    module: nn.Module
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({type(self.module).__name__})"


@dataclass(frozen=True)
class FailedExpression:
    """The expression that raised an error.

    Attributes:
        line: such as ``model.py:12``.
        text: its source; "" if there is none.
        variables: those that hold tensors, by name; without source, all local variables.
        owner: the value of ``self`` there.
        operands: the tensors of the failed operator; () if torch's frames do not show them.
    """

    line: str
    text: str
    variables: Mapping[str, Any]
    owner: object
    operands: Sequence[torch.Tensor]

    def __str__(self) -> str:
        at = f"at {self.line}" + f", `{textwrap.shorten(self.text, _MAX_LENGTH)}`" * bool(self.text)
        tensors = [f"{name} is {describe_tensors(value)}" for name, value in self.variables.items()]
        return f"{at}: {'; '.join(tensors)}" if tensors else at


def ends_call_of(error: BaseException, module: nn.Module) -> bool:
    """Whether an error ended a call of this module; another error may be handled meanwhile."""
    frame = error.__traceback__.tb_frame if error.__traceback__ else None
    return frame is not None and frame.f_code in _CALLS and frame.f_locals["self"] is module


def unfinished_calls(error: BaseException, names: Mapping[nn.Module, str]) -> list[ModuleCall]:
    """Returns the module calls that an error ended, the innermost last.

    Args:
        error: that was caught.
        names: paths of the modules to look for.
    """
    calls: list[ModuleCall] = []
    for frame in _frames(error):
        module = frame.f_locals.get("self") if frame.f_code in _CALLS else None
        if not isinstance(module, nn.Module) or module not in names:
            continue
        args, positional = frame.f_locals["args"], positional_names(module)
        by_position = {
            positional[at] if at < len(positional) else str(at): value
            for at, value in enumerate(args)
        }
        if calls and calls[-1].module is module:
            calls.pop()  # the inner frame has the arguments after the hooks
        calls.append(ModuleCall(names[module], module, by_position | frame.f_locals["kwargs"]))
    return calls


def expression_of(error: BaseException) -> FailedExpression | None:
    """Returns the innermost expression in the code of the model or of torch.nn's modules.

    Args:
        error: that was caught.
    """
    entries = [*_entries(error)]
    own = [at for at, entry in enumerate(entries) if not _is_dispatch(entry.tb_frame)]
    if not own:
        return None
    entry, below = entries[own[-1]], entries[own[-1] + 1 :]
    frame = entry.tb_frame
    text, scope = _source(entry), frame.f_locals
    tree = _parsed(text)
    variables = scope if tree is None else dict(_variables(tree, scope))
    operands = (tensors_of(one.tb_frame.f_locals.get("args")) for one in below)
    return FailedExpression(
        f"{Path(frame.f_code.co_filename).name}:{entry.tb_lineno}",
        " ".join(text.split()),
        {name: value for name, value in variables.items() if name != "self" and tensors_of(value)},
        scope.get("self"),
        next((found for found in operands if any(isinstance(one, DTensor) for one in found)), ()),
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (entry.tb_frame for entry in _entries(error))


def _is_dispatch(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return any(name == one or name.startswith(f"{one}.") for one in _DISPATCH_MODULES)


def _source(entry: TracebackType) -> str:
    """Returns the source of the failed instruction."""
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
    except SyntaxError:  # it is part of a statement
        return None


def _variables(tree: ast.AST, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields variables and attributes of variables, without running any code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield node.id, scope[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            registries: list[Mapping[str, Any]] = [getattr(owner, "__dict__", {})]
            if isinstance(owner, nn.Module):
                registries += [owner._parameters, owner._buffers]
            for registry in registries:
                if node.attr in registry:
                    yield f"{node.value.id}.{node.attr}", registry[node.attr]
