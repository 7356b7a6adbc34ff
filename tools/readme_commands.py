"""Finds the commands that the workspace's pages show, and says which of them cannot run.

Looked at are lines of code blocks, and code within the text, that begin as a command does. A
command is not started: its files, sessions, packages and options have to be there. Those of
integration's modules are put through their own parsers by integration/tests/test_readme.py.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tools.workspace import ROOT

__all__ = ["Command", "commands", "pages", "problems", "siblings"]

_BLOCK = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_STARTS = re.compile(
    r"^(?:[A-Z_]+=\S+ )*"
    r"(?:(?:\.\S+/)?(?:python3?|pytest|nox|pip)|torchrun|c\+\+|\.ci/run|tools/\S+\.(?:sh|py))"
    r"(?: |$)"
)
# What a session of the noxfile takes in parentheses: a project, or a torch.
_SESSION = re.compile(r"^(\w+)(?:\((.+)\))?$")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: where it stands.
        text: as it stands there, on one line, without a comment behind it.
    """

    page: Path
    text: str

    @property
    def words(self) -> list[str]:
        """What a shell makes of it, without variables that are set for it."""
        words = shlex.split(self.text)
        while "=" in words[0]:
            words.pop(0)
        return words

    @property
    def program(self) -> str:
        """What is run, without its folder."""
        return Path(self.words[0]).name


def pages(root: Path = ROOT) -> list[Path]:
    """The READMEs and documents of the workspace."""
    found = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("*/README.md")]
    return sorted([*found, *root.glob("packages/*/README.md"), *root.glob("docs/**/*.md")])


def commands(page: Path) -> Iterator[Command]:
    """The commands that a page shows, in order, with those of one line joined by ``&&`` apart."""
    text = page.read_text()
    shown = [
        line
        for _, language, code in _BLOCK.findall(text)
        if language in ("", "sh")
        for line in code.replace("\\\n", " ").splitlines()
    ]
    shown += re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))
    for line in shown:
        for part in line.split(" && "):
            part = part.strip().partition("  #")[0].strip()
            if _STARTS.match(part):
                yield Command(page, re.sub(r"\s+", " ", part))


def problems(command: Command, root: Path = ROOT) -> Iterator[str]:
    """Why a command cannot run as it stands, a sentence each."""
    _, *words = command.words
    match command.program, words:
        case "nox", _:
            yield from _of_nox(words, root)
        case (("python" | "python3"), ["-m", module, *_]):
            if not _module(module, root):
                yield f"there is no module {module}"
        case "torchrun", _:
            if "-m" in words and not _module(words[words.index("-m") + 1], root):
                yield f"there is no module {words[words.index('-m') + 1]}"
        case "python", [script, *options] if script.startswith(("packages/", "tools/")):
            yield from _of_script(root / script, options)
        case "pytest", [*paths]:
            yield from (
                f"there is no {path}"
                for path in paths
                if "/" in path and not any(root.glob(path.partition("::")[0]))  # or a pattern
            )
        case "pip", ["install", *wanted]:
            yield from _of_pip(wanted, root)
        case "pip", ["check"]:
            return
        case _ if "/" in command.words[0] and (root / command.words[0]).exists():
            return
        case _ if command.program in ("c++", "python"):
            return  # of the reader's own files
        case _:
            yield f"nobody knows how to check {command.text!r}; say it in tools/readme_commands.py"


def _of_nox(words: list[str], root: Path) -> Iterator[str]:
    tree = ast.parse((root / "noxfile.py").read_text())
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    options, _, behind = " ".join(map(shlex.quote, words)).partition(" -- ")
    split = shlex.split(options)
    for name in split[split.index("-s") + 1 :] if "-s" in split else []:
        session = _SESSION.match(name)
        is_version = session and str(session[2]).startswith(("2.", "3."))  # of torch or Python
        if session is None or session[1] not in sessions:
            yield f"there is no session {name}"
        elif session[2] and not is_version and not _project(session[2], root):
            yield f"there is no project {session[2]}"
    if "tests" in split:
        names = takewhile(lambda word: not word.startswith("-"), shlex.split(behind))
        yield from (f"there is no project {name}" for name in names if not _project(name, root))
    if "bench" in split:
        package, *rest = shlex.split(behind) or [""]
        if package and not package.isupper():  # PACKAGE is the reader's to replace
            yield from _of_script(root / f"packages/{package}/benchmarks/run.py", rest)


def _of_script(script: Path, options: list[str]) -> Iterator[str]:
    if not script.is_file():
        yield f"there is no {script.name} in {script.parent}"
        return
    known = _options(script)
    for option in options:
        if option.startswith("--") and option.partition("=")[0] not in known:
            yield f"{script.name} has no {option}"


def _options(script: Path) -> set[str]:
    """Options that a script, or a module beside it that it imports, adds to a parser."""
    tree = ast.parse(script.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            beside = script.with_name(f"{node.module}.py")
            found |= _options(beside) if beside.is_file() else set()
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            names = (each.value for each in node.args if isinstance(each, ast.Constant))
            found |= {name for name in names if isinstance(name, str)}
    return found


def _of_pip(wanted: list[str], root: Path) -> Iterator[str]:
    """Folders have to be projects with these extras, and what they need has to be found."""
    parts = [word.rstrip("]").partition("[") for word in wanted if word.startswith("./")]
    extras = {Path(folder): names.split(",") if names else [] for folder, _, names in parts}
    folders = list(extras)
    names = {folder.name for folder in folders}
    if "siblings.txt" in wanted:
        names |= siblings(root)
    packages = {path.parent.name for path in root.glob("packages/*/pyproject.toml")}
    for folder in folders:
        project = root / folder / "pyproject.toml"
        if not project.is_file():
            yield f"{folder} is no project"
            continue
        metadata = tomllib.loads(project.read_text())["project"]
        offered = metadata.get("optional-dependencies", {})
        for extra in extras[folder]:
            if extra not in offered:
                yield f"{folder} has no extra {extra}"
        brought = (each for extra in extras[folder] for each in offered.get(extra, []))
        for needed in [*metadata.get("dependencies", []), *brought]:
            name = re.split(r"[^\w-]", needed)[0]
            if name in packages - names:
                yield f"{folder} needs {name}, which is not on an index; add -c siblings.txt"


def siblings(root: Path = ROOT) -> set[str]:
    """The packages that siblings.txt tells pip of."""
    lines = (root / "siblings.txt").read_text().splitlines()
    return {line.partition(" @ ")[0] for line in lines if line and not line.startswith("#")}


def _module(name: str, root: Path) -> bool:
    """Whether ``python -m`` finds a module: by its file, or by its distribution."""
    parts = name.split(".")
    sources = [root, *root.glob("packages/*/src"), *root.glob("*/src")]
    if not any((source / parts[0]).is_dir() for source in sources):
        return parts[0] in ("torch", "venv", "pybind11", "pytest", "mypy")
    paths = [source.joinpath(*parts) for source in sources]
    modules = [*(path / "__main__.py" for path in paths), *(p.with_suffix(".py") for p in paths)]
    return any(module.is_file() for module in modules)


def _project(name: str, root: Path) -> bool:
    return (root / "packages" / name).is_dir() or (root / name / "tests").is_dir()
