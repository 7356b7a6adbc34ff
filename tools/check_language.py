"""Checks names and prose against the terminology: ``python -m tools.check_language``.

``NAMES`` are refused as identifiers and as names of modules, ``MODULES`` as names of modules only,
exactly; ``PHRASES`` in docstrings, comments, strings and pages. All say what to write instead: the
terms of torch, NCCL and Megatron.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import NOT_SOURCE, ROOT

#: Identifier or module: what to write instead.
NAMES = {
    "adopt": "reset_sharded_param or swap",
    "anew": "again",
    "came": "received",
    "faults": "errors",
    "flight": "in_flight_bucket",
    "held": "allocated",
    "home": "combine or restore",
    "keep": "cache",
    "keeper": "cache",
    "kept": "the cache of the post-forward shard, or cached",
    "land": "wait",
    "last_words": "resolved_overrides",
    "lend": "swap_in",
    "live_in": "bucket_view",
    "loan": "swap",
    "meeting": "rendezvous",
    "mend": "repair",
    "moment": "hook_point",
    "ours": "the name of the package, or actual",
    "return_home": "restore",
    "roll_call": "liveness_check",
    "said": "description",
    "seam": "patch_point",
    "seams": "patch_points",
    "stand": "rank_snapshot",
    "stock": "native",
    "tell": "log",
    "teller": "logger",
    "theirs": "native or expected",
    "told": "logged",
    "twin": "shadow_model",
}
#: Module: what to write instead. As identifiers these are ordinary words.
MODULES = {
    "board": "store_channel",
    "given": "arguments",
    "line": "source_location",
    "lines": "loc",
    "move": "redistribute",
    "needs": "requirements",
    "partners": "stage_parallelism",
    "passed": "coverage",
    "pictures": "samples",
    "stays": "eager_fallback",
    "use": "requirements",
    "way": "strategy",
    "weightless": "event recorder",
    "within": "stage_context",
}
#: A pattern in prose: what to write instead.
PHRASES = {
    r"\b(ours|theirs)\b": "this package, torch, native",
    r"\bof our own\b": "the name of the package",
    r"\bstock\b": "native or torch's",
    r"\bseams?\b": "patch point, or extension point",
    r"\bheld against\b": "validated against",
    r"\banew\b": "again",
    r"\bwants?\b": "expected, takes",
    r"\b(is|are|was|were) told\b": "gets, is logged",
    r"\b(lies?|lay|lives?) (in|on|at|behind|before|beside|there|outside)\b": "is placed, is",
    r"\bstands? (in|on|at|behind|beside)\b": "is registered, is placed, replaces",
    r"\b(comes?|came) home\b": "is restored",
    r"\blast words?\b": "description, resolved overrides",
    r"\broll[- ]calls?\b": "liveness check",
    r"\btwins?\b": "shadow model",
    r"\bbelies?\b": "does not match",
}
#: (file, name or phrase): why it may stay.
ALLOWED: dict[tuple[str, str], str] = {
    ("docs/support/options.md", r"\bstock\b"): "a value of --random",
    ("integration/src/integration/train/config.py", r"\bstock\b"): "a value of --random",
    ("packages/fsdp/src/fsdp/module.py", "keep"): "torch's argument of this method",
}
#: The lists, and their tests.
EXEMPT = ("tools/check_language.py", "tools/tests/test_check_language.py")
FOLDERS = ("docs", "integration", "packages", "testkit", "tools")
CPP = {".cpp", ".h", ".hpp", ".cu", ".cuh"}
GENERATED = NOT_SOURCE | {"build", "dist"}
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((.*?)\)"|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@dataclass(frozen=True)
class Text:
    """A name, or a piece of prose, and the line where it begins."""

    text: str
    line: int


def python_names(source: str) -> Iterator[Text]:
    """What a module defines: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Text(node.name, node.lineno)
        elif isinstance(node, ast.arg):
            yield Text(node.arg, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Text(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Text(node.attr, node.lineno)


def python_prose(source: str) -> Iterator[Text]:
    """Its comments and strings."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield Text(token.string, token.start[0])


def cpp_names(source: str) -> Iterator[Text]:
    """The identifiers of a C++ file, torch's among them."""
    code = COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    for found in re.finditer(r"\b[A-Za-z_]\w*\b", code):
        yield Text(found[0], code.count("\n", 0, found.start()) + 1)


def cpp_prose(source: str) -> Iterator[Text]:
    """Its comments and strings."""
    for found in COMMENT.finditer(source):
        yield Text(found[0], source.count("\n", 0, found.start()) + 1)


def page_prose(source: str) -> Iterator[Text]:
    """The lines of a page outside of its blocks of code, without code in backticks."""
    inside = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield Text(re.sub(r"`[^`]*`", "", line), number)


def check(path: Path, root: Path) -> Iterator[str]:
    """One line of text for each refused name or phrase of a file."""
    where, source = path.relative_to(root), path.read_text()
    if path.suffix != ".md" and path.stem in MODULES:
        yield f"{where}:1: the module {path.stem}; write {MODULES[path.stem]}"
    names: list[Text] = [Text(path.stem, 1)] if path.suffix != ".md" else []
    if path.suffix in {".py", ".pyi"}:
        names += python_names(source)
        prose = list(python_prose(source))
    elif path.suffix in CPP:
        names += cpp_names(source)
        prose = list(cpp_prose(source))
    else:
        prose = list(page_prose(source))
    for name in names:
        bare = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.text).lower().strip("_")
        if bare in NAMES and (str(where), bare) not in ALLOWED:
            yield f"{where}:{name.line}: the name {name.text}; write {NAMES[bare]}"
    for text in prose:
        for pattern, instead in PHRASES.items():
            for found in re.finditer(pattern, text.text, re.IGNORECASE):
                line = text.line + text.text.count("\n", 0, found.start())
                if (str(where), pattern) not in ALLOWED:
                    yield f"{where}:{line}: {found[0]!r}; write {instead}"


def files(root: Path) -> Iterator[Path]:
    """The sources and pages that are checked, in order; results of runs are not among them."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
    for path in sorted([*found, *root.glob("*")]):
        where = path.relative_to(root)
        if path.suffix not in CPP | {".py", ".pyi", ".md"} or GENERATED.intersection(where.parts):
            continue
        skipped = any(where.is_relative_to(folder) for folder in EXEMPT)
        if path.is_file() and not skipped:
            yield path


def main(root: Path = ROOT) -> int:
    """Prints what is refused; the exit status."""
    found = [line for path in files(root) for line in check(path, root)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
