"""Counts the lines of plan code of the zoo, beside those that the veScale paper reports.

Counted are the lines of the zoo that run when a plan is made for tensor, sequence and data
parallelism, in the functions that it calls as well; not docstrings, blank lines and comments, nor
what refuses options and names placements, which builds nothing. Lines of `annotate` are counted by
themselves: they are for static mode, and do nothing in Eager, of which the paper's counts are.
Lines are those of the formatted file, so a statement over two lines is two.

    python -m tools.plan_lines
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["PAPER", "count", "lines_run", "plan_lines"]

ZOO = Path(__file__).parents[1] / "packages/plan-api/src/plan_api/zoo"
#: The paper's own counts, for its plans of models of the same names.
PAPER = {"llama": 29, "mixtral": 38, "dit": 38}
#: Functions that build nothing.
NOT_PLANS = frozenset({"check_options", "expert_axes", "fused", "names_of"})


def plan_lines(source: str, run: set[int]) -> tuple[int, int]:
    """The lines of plan code among those that have run.

    Args:
        source: of a module.
        run: numbers of its lines; of a statement over several, any of them.

    Returns:
        how many there are without, and with nothing but, calls of `annotate`.
    """
    lines = source.splitlines()
    counted: set[int] = set()
    annotations: set[int] = set()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or function.name in NOT_PLANS:
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function or _builds_nothing(node):
                continue
            own = set(range(node.lineno, _end(node) + 1))
            if own & run:
                code = {number for number in own if _is_code(lines[number - 1])}
                (annotations if _annotates(node) else counted).update(code)
    return len(counted), len(annotations)


def lines_run(call: Callable[[], Any], folder: Path) -> dict[Path, set[int]]:
    """The lines of the modules in a folder that run in a call.

    Args:
        call: of a function there.
        folder: with the modules.
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
    """The last line of a statement, or of the head of one that has others in it."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else statement.end_lineno or statement.lineno


def _builds_nothing(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in NOT_PLANS
    )


def _annotates(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr == "annotate"
    )


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def count(name: str) -> tuple[int, int]:
    """The lines of a plan of the zoo, and those for static mode."""
    from plan_api import zoo
    from testkit import fake_mesh

    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        run = lines_run(lambda: getattr(zoo, name)(mesh, dp="dp", sp=True), ZOO)
    counts = [plan_lines(path.read_text(), numbers) for path, numbers in run.items()]
    return sum(plan for plan, _ in counts), sum(static for _, static in counts)


def main() -> None:
    """Prints a line per plan of the zoo."""
    print(f"{'plan':10}{'lines':>6}{'paper':>7}{'static':>8}")
    for path in sorted(ZOO.glob("*.py")):
        if path.stem in ("__init__", "needs"):
            continue
        plan, static = count(path.stem)
        paper = str(PAPER.get(path.stem, "-"))
        print(f"{path.stem:10}{plan:>6}{paper:>7}{static:>8}")


if __name__ == "__main__":
    main()
