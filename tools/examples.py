"""Runs what the pages of `docs/packages/*/example.md` show: one package within another framework.

A page has pairs of a block of Python, a whole script, and a block of the command that runs it.
The script says what it needs as inline metadata does (PEP 723, ``# /// script``). Here a test
runs it where the workspace's other packages cannot be imported, and ``tools.check_wheels`` where
they are not installed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testkit.inspection.readme import blocks
from tools.workspace import ROOT

__all__ = ["Example", "examples", "run", "without"]

SCRIPT = "example.py"
# How an environment's own Python runs what a page says: its bin/ need not hold these.
PROGRAMS = {"python": (), "torchrun": ("-m", "torch.distributed.run")}
# Read by every interpreter as it starts, where PYTHONPATH leads to it.
WITHOUT = '''
import sys

class Without:
    """A finder that does not see some packages, as if they were not installed."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name in {names}:  # nor what is within, which asks for the package first
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
'''

LEAVE = """
import os
import sys

sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Example:
    """A script of a page.

    Attributes:
        page: where it stands.
        code: the script.
        command: the words that run it.
    """

    page: Path
    code: str
    command: tuple[str, ...]

    @property
    def dependencies(self) -> list[str]:
        """The requirements that it declares."""
        found = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", self.code, re.MULTILINE)
        if found is None:
            raise ValueError(f"{self.page}: a script without `# /// script` and what it needs")
        table = tomllib.loads(re.sub(r"^# ?", "", found[1], flags=re.MULTILINE))
        return [str(requirement) for requirement in table["dependencies"]]


def examples(package: str, root: Path = ROOT) -> list[Example]:
    """The scripts of a package's page.

    Raises:
        ValueError: it has none, or one without its command.
    """
    page = root / "docs" / "packages" / package / "example.md"
    scripts, commands = (blocks(page.read_text(), language) for language in ("python", "sh"))
    if not scripts or len(scripts) != len(commands):
        raise ValueError(
            f"{page}: {len(scripts)} blocks of Python and {len(commands)} of commands (sh); "
            f"expected pairs, at least one"
        )
    words = [tuple(shlex.split(command)) for command in commands]
    for command in words:
        if command[0] not in PROGRAMS or command[-1] != SCRIPT:
            raise ValueError(f"{page}: {command}; expected {' or '.join(PROGRAMS)} of {SCRIPT}")
    return [Example(page, *pair) for pair in zip(scripts, words, strict=True)]


def without(modules: Iterable[str], folder: Path) -> dict[str, str]:
    """This process's environment, for interpreters that cannot import these modules.

    Args:
        modules: names of top-level modules.
        folder: where what hides them is written.
    """
    (folder / "sitecustomize.py").write_text(WITHOUT.format(names=set(modules)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def run(
    example: Example, folder: Path, *, python: str = sys.executable, env: dict[str, str]
) -> None:
    """Runs a script by its page's command, in a folder of its own.

    Behind its last line the process is ended at once: one of gloo's threads that lets go of a
    tensor while Python finalizes aborts it (pytorch/pytorch#190489), now and then on a loaded
    machine.

    Raises:
        CalledProcessError: it failed; what it printed is on this process's own output.
    """
    (folder / SCRIPT).write_text(example.code + LEAVE)
    program, *words = example.command
    # As tests run: one thread a rank, or ranks would wait for one another's.
    env = {"OMP_NUM_THREADS": "1"} | env
    subprocess.run([python, *PROGRAMS[program], *words], check=True, cwd=folder, env=env)
