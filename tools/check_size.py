"""Checks the size of functions, files and folders: ``python -m tools.check_size``."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.workspace import NOT_SOURCE, ROOT

MOST_OF_FUNCTION, MOST_OF_FILE, MOST_OF_FOLDER = 60, 700, 16
FOLDERS = ("packages", "testkit", "integration", "tools")
SUFFIXES = {".py", ".pyi", ".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh"}
GENERATED = NOT_SOURCE | {"build", "dist"}
SOURCES = {"src", "include"}  # folders below these are counted; tests mirror them

#: A file and function, or a folder: why it may be larger.
ALLOWED: dict[str, str] = {
    "integration/src/integration": "nine of its folders are commands, python -m integration.NAME",
}


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without those of its docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def check_file(path: Path, where: str) -> Iterator[str]:
    """One line of text where a file is too long, and one for each function that is."""
    source = path.read_text()
    lines = len(source.splitlines())
    if lines > MOST_OF_FILE:
        yield (
            f"{where}:{MOST_OF_FILE + 1}: the file has {lines} lines, and {MOST_OF_FILE} are the "
            "most; split it into modules with one concept each"
        )
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = lines_of(node)
            if lines > MOST_OF_FUNCTION and f"{where}:{node.name}" not in ALLOWED:
                yield (
                    f"{where}:{node.lineno}: {node.name} has {lines} lines besides its docstring, "
                    f"and {MOST_OF_FUNCTION} are the most; make functions of its steps"
                )


def check_folder(path: Path, where: str) -> Iterator[str]:
    """One line of text where a folder of sources has too many entries."""
    entries = [one for one in path.iterdir() if one.suffix in SUFFIXES or one.is_dir()]
    count = sum(one.name not in GENERATED for one in entries)
    if count > MOST_OF_FOLDER and where not in ALLOWED:
        yield (
            f"{where}: the folder has {count} entries, and {MOST_OF_FOLDER} are the most; "
            "group what belongs together, or merge it"
        )


def check(root: Path) -> Iterator[str]:
    """One line of text for each function, file and folder that is too large."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            inner = path.relative_to(root).parts
            if GENERATED.intersection(inner):
                continue
            if path.is_dir() and SOURCES.intersection(inner):
                yield from check_folder(path, "/".join(inner))
            elif path.is_file() and path.suffix in SUFFIXES:
                yield from check_file(path, "/".join(inner))


def main(root: Path = ROOT) -> int:
    """Prints what is too large; the exit status."""
    found = list(check(root))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
