"""Finds the imports of a module without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@dataclass(frozen=True)
class Import:
    """One imported name, absolute; lazy when importing the module does not run it."""

    name: str
    line: int
    lazy: bool


def imports(node: ast.AST, package: str, *, lazy: bool = False) -> Iterator[Import]:
    """Every import below ``node``, in a module of ``package``; ``import_module("x")`` too."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        above = parts[: len(parts) + 1 - node.level] if node.level else []
        base = ".".join(above + ([node.module] if node.module else []))
        yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        names = [text.value for text in node.args[:1] if isinstance(text, ast.Constant)]
        yield from (Import(str(name), node.lineno, lazy) for name in names)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    unrun: list[ast.stmt] = []  # the body of `if TYPE_CHECKING`, but not its `else`
    if isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING:
        unrun = node.body
    for child in ast.iter_child_nodes(node):
        yield from imports(child, package, lazy=lazy or inside or child in unrun)
