"""Counts the lines of plan code of the zoo, beside those that the veScale paper reports.

A line of plan code is a line of a zoo function's body that builds the plan. Not counted are the
docstring, blank lines and comments, imports, and calls of `check_options`, which refuse options and
build nothing. A plan that begins with another's has that one's lines, too. Lines are those of the
formatted file, so a statement over two lines is two.

    python -m tools.plan_lines
"""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["PAPER", "plan_lines", "total_lines"]

ZOO = Path(__file__).parents[1] / "packages/plan-api/src/plan_api/zoo"
#: The paper's own counts, for its plans of models of the same names.
PAPER = {"llama": 29, "mixtral": 38, "dit": 38}


def plan_lines(source: str, name: str) -> int:
    """The number of lines of plan code in a function.

    Args:
        source: of its module.
        name: of the function.

    Raises:
        ValueError: the module has no such function.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines = source.splitlines()
            numbers = {
                number
                for statement in node.body
                if not _builds_nothing(statement)
                for number in range(statement.lineno, (statement.end_lineno or 0) + 1)
            }
            return sum(_is_code(lines[number - 1]) for number in numbers)
    raise ValueError(f"no function {name!r} in this module: give the source of its own")


def _builds_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Constant):
        return True  # the docstring
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "check_options"
    )


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def total_lines(name: str) -> int:
    """The lines of a plan of the zoo, with those of the plans of the zoo that it begins with."""
    source = (ZOO / f"{name}.py").read_text()
    others = {path.stem for path in ZOO.glob("*.py")} - {"__init__", "needs", name}
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return plan_lines(source, name) + sum(total_lines(other) for other in others & used)


def main() -> None:
    """Prints a line per plan of the zoo."""
    print(f"{'plan':10}{'lines':>6}{'paper':>7}")
    for path in sorted(ZOO.glob("*.py")):
        if path.stem in ("__init__", "needs"):
            continue
        paper = str(PAPER.get(path.stem, "-"))
        print(f"{path.stem:10}{total_lines(path.stem):>6}{paper:>7}")


if __name__ == "__main__":
    main()
