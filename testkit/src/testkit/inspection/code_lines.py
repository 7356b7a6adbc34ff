"""Counts lines of code: those of a folder's functions that a call runs.

Lines are those of the formatted file, so a statement over two lines counts as two. Docstrings,
comments, blank lines, imports and the heads of functions are not counted.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Built", "body_lines", "built_by", "code_lines", "lines_built", "lines_run"]

_LAYOUT = frozenset(
    {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Built:
    """The number of lines that were run.

    Attributes:
        lines: without those of calls of `annotate`.
        annotations: of calls of `annotate`, with which a plan declares what static mode needs.
    """

    lines: int
    annotations: int

    def __add__(self, other: Built) -> Built:
        return Built(self.lines + other.lines, self.annotations + other.annotations)


def built_by(
    call: Callable[[], Any],
    folder: Path,
    *,
    functions: Collection[str] | None = None,
    without: Collection[str] = (),
) -> Built:
    """Counts the lines of a folder's modules that a call runs.

    Args:
        call: calls functions of the folder.
        folder: of the modules.
        functions: those that are counted; None for all.
        without: functions that are not counted, nor are statements that only call them.
    """
    total = Built(0, 0)
    for path, run in lines_run(call, folder).items():
        total += lines_built(path.read_text(), run, functions=functions, without=without)
    return total


def lines_built(
    source: str,
    run: set[int],
    *,
    functions: Collection[str] | None = None,
    without: Collection[str] = (),
) -> Built:
    """Counts the lines of a module's functions that were run.

    Args:
        source: of the module.
        run: the numbers of the lines that were run; of a statement over several lines, any.
        functions: as in `built_by`.
        without: as in `built_by`.
    """
    code = code_lines(source)
    counted: set[int] = set()
    annotations: set[int] = set()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or function.name in without:
            continue
        if functions is not None and function.name not in functions:
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function or _calls(node, without):
                continue
            own = set(range(node.lineno, _end(node) + 1))
            if own & run:
                (annotations if _annotates(node) else counted).update(own & code)
    return Built(len(counted), len(annotations))


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines with code: not docstrings, comments and blank lines."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def body_lines(source: str) -> set[int]:
    """Returns the numbers of the lines with code in bodies of functions and methods."""
    bodies: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            bodies.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return bodies & code_lines(source)


def lines_run(call: Callable[[], Any], folder: Path) -> dict[Path, set[int]]:
    """Returns the lines of the modules in a folder that a call runs.

    Args:
        call: calls functions of the folder.
        folder: of the modules.
    """
    run: dict[Path, set[int]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.parent.name != folder.name or not (folder / path.name).exists():
            return None
        if event == "line":
            run.setdefault(folder / path.name, set()).add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return run


def _end(statement: ast.stmt) -> int:
    """Returns the last line of a statement, or of its head if it has a body."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else statement.end_lineno or statement.lineno


def _calls(statement: ast.stmt, names: Collection[str]) -> bool:
    """Whether a statement only calls one of these functions."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names


def _annotates(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr == "annotate"
    )
