"""Shows that tests need every wait: ``python -m tools.check_waits [PACKAGE ...] [--page FILE]``.

Work on an accelerator is ordered by events that streams record and wait for, and by the waits of
collectives. Each such call in the packages is removed, one at a time, in a copy of the package that
stands before the installed one, and the package's tests on the simulated device run: one must fail.
A call without which they pass has to be in EQUIVALENT with the reason, and no other call may be.
FILE gets the table, in Markdown. Exit status 1 where tests pass without a call, or fail with all.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, Project, packages

# Calls that return nothing: None takes their place. `wait` counts where its result is not used.
WAITS = ("all_gather_waits", "record_stream", "synchronize", "wait_event", "wait_stream")
# Calls that return an event: one that is never recorded takes its place, for which nothing waits.
RECORDS = ("record", "record_event")
UNRECORDED = "torch.get_device_module(torch.accelerator.current_accelerator()).Event()"

# Where a package's tests of such calls are, below its tests.
TESTS = {
    "dbuffer": ["test_sim.py", "test_collectives.py"],  # the CPU has an exchange of its own
    "fsdp": ["test_sim.py", "test_extensions.py", "test_comm.py"],
}
DEFAULT_TESTS = ["test_sim.py"]

# Why no test can fail without the call, by file below packages/, function and source.
EQUIVALENT = {
    (
        "fused-comm/src/fused_comm/diagnosis/watch.py", "Watch._watch",
        "self._changed.wait(remaining)",
    ): "a thread's condition, not a device's: without it the thread asks again and again",
}  # fmt: skip


@dataclass(frozen=True)
class OrderingCall:
    """A call that orders work on a device.

    Attributes:
        path: of its file, below ``packages/``.
        function: in which it is, with its class.
        source: of the call.
        start: offset of its first byte in the file.
        stop: offset behind its last byte.
        replacement: source that does not order anything.
    """

    path: str
    function: str
    source: str
    start: int
    stop: int
    replacement: str

    @property
    def key(self) -> tuple[str, str, str]:
        """By which EQUIVALENT knows it."""
        return self.path, self.function, self.source

    def removed(self, text: bytes) -> bytes:
        """Returns the file's text without the call."""
        return text[: self.start] + self.replacement.encode() + text[self.stop :]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, text: bytes) -> None:
        self.found: list[OrderingCall] = []
        self._path, self._text = path, text
        self._names: list[str] = []
        self._unused: set[ast.expr] = set()
        lengths = [len(line) for line in text.splitlines(keepends=True)]
        self._starts = [sum(lengths[:number]) for number in range(len(lengths))]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_within(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_within(node)

    def _visit_within(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_Expr(self, node: ast.Expr) -> None:
        self._unused.add(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return
        name = node.func.attr
        if name in WAITS or (name == "wait" and node in self._unused):
            self._add(node, "None")
        elif name in RECORDS and not node.args:
            self._add(node, UNRECORDED)

    def _add(self, node: ast.Call, replacement: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        stop = self._starts[node.end_lineno - 1] + node.end_col_offset
        function = ".".join(self._names)
        source = " ".join(self._text[start:stop].decode().split())
        self.found.append(
            OrderingCall(self._path, function, source, start, stop, replacement)
        )  # fmt: skip


def ordering_calls(text: bytes, path: str) -> list[OrderingCall]:
    """Finds the calls of a file, in order.

    Args:
        text: of the file.
        path: which its calls say.
    """
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    return finder.found


def failing_test(project: Project, call: OrderingCall | None) -> str | None:
    """Runs a package's tests on the simulated device; returns the first that fails, and the error.

    Args:
        project: the package.
        call: what to remove; None removes nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / project.source.name
        installed = _installed(project.source.name)
        shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        shutil.copytree(
            project.source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
        if call is not None:
            file = Path(folder) / Path(call.path).relative_to(f"{project.name}/src")
            file.write_bytes(call.removed(file.read_bytes()))
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        names = TESTS.get(project.name, DEFAULT_TESTS)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-m", "slow or not slow", "--tb=line"]
        command += [str(project.folder / "tests" / name) for name in names]
        ran = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True
        )
    if ran.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S+?::(.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"check_waits: pytest did not run the tests:\n{ran.stdout}{ran.stderr}")
    return failed[1]


@functools.cache
def _installed(package: str) -> Path:
    """The installed package's folder, which has the compiled files."""
    command = [sys.executable, "-c", f"import {package}; print({package}.__path__[0])"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return Path(found.stdout.splitlines()[-1])


def page(rows: list[tuple[OrderingCall, str | None]]) -> str:
    """Returns the page with what became of each call."""
    today, cores = datetime.date.today().isoformat(), os.cpu_count()
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [
        "# Waits",
        "",
        "Work on an accelerator is ordered by events that streams record and wait for, and by the "
        "waits of collectives. Each of these calls was removed by itself, and the package's tests "
        "on the simulated device (`tests/test_sim.py`, and the files that `tools/check_waits.py` "
        "names) ran: the first one that failed is named. "
        f"`python -m tools.check_waits --page docs/support/waits.md`, {today}, at "
        f"{described.stdout.strip()}, {cores} cores.",
        "",
        "| Function | Call | Without it |",
        "| --- | --- | --- |",
    ]
    for call, failed in rows:
        where = f"`{call.path.partition('/src/')[2]}`: `{call.function}`"
        without = f"`{failed}` fails" if failed else EQUIVALENT.get(call.key, "**no test fails**")
        lines.append(f"| {where} | `{call.source}` | {without} |".replace("\n", " "))
    return "\n".join([*lines, ""])


def main() -> int:
    """Parses the command line; returns the exit status."""
    projects = {project.name: project for project in packages()}
    parser = argparse.ArgumentParser(prog="check_waits", description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="by default all")
    parser.add_argument("--page", type=Path, metavar="FILE", help="Markdown to write")
    arguments = parser.parse_args()
    if unknown := set(arguments.packages) - projects.keys():
        parser.error(f"no package {sorted(unknown)}; there are {sorted(projects)}")
    rows: list[tuple[OrderingCall, str | None]] = []
    wrong = []
    for name in arguments.packages or projects:
        project = projects[name]
        calls = [
            call
            for file in sorted(project.source.rglob("*.py"))
            for call in ordering_calls(
                file.read_bytes(), str(file.relative_to(project.folder.parent))
            )
        ]
        if calls and (failed := failing_test(project, None)):
            wrong.append(f"{name}: {failed} fails with every wait")
            continue
        for call in calls:
            failed = failing_test(project, call)
            rows.append((call, failed))
            print(f"{call.path}: {call.function}: {call.source}: {failed or 'no test fails'}")
            if (failed is None) != (call.key in EQUIVALENT):
                what = "EQUIVALENT names it" if failed else "no test fails without it"
                wrong.append(f"{call.path}: {call.function}: {call.source}: {what}")
    if arguments.page:
        arguments.page.write_text(page(rows))
    for line in wrong:
        print(f"check_waits: {line}", file=sys.stderr)
    if not wrong:
        needed = sum(failed is not None for _, failed in rows)
        print(f"check_waits: tests need {needed} of {len(rows)} waits, others are in EQUIVALENT")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
