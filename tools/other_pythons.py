"""Tests with another Python what needs no torch: ``python -m tools.other_pythons 3.12``.

The planner of ragged-shard, the CPU stream of dist-rng and the loops of fsdp's 8-bit Adam are built
and tested in full. Of all packages the sources are compiled, with warnings as errors, and the
metadata must allow that Python. The environment is made in ``.nox/python-3.12``; its torch is
missing on purpose, as an import of it in a part that needs none fails then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tools.workspace import ROOT, Project, packages

# Compiled without torch, and their tests that need none.
TESTS = {
    "ragged-shard": "packages/ragged-shard/tests/planner",
    "dist-rng": "packages/dist-rng/tests/test_core_without_torch.py",
    "fsdp": "packages/fsdp/tests/test_adam8bit_core.py",
}
TOOLS = ("scikit-build-core", "cmake", "ninja", "pybind11")
NEEDED = ("pytest", "hypothesis", "numpy", "rich", "matplotlib")
PINS = ROOT / "constraints.txt"


def interpreter(version: str, pyenv_root: Path | None = None) -> Path:
    """The path of a Python: on PATH, or of pyenv's versions the newest.

    Args:
        version: as 3.12.
        pyenv_root: pyenv's folder, by default of the environment or ``~/.pyenv``.

    Raises:
        SystemExit: there is none.
    """
    if pyenv_root is None:
        pyenv_root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    made = sorted(
        pyenv_root.glob(f"versions/{version}.*/bin/python"),
        key=lambda path: [int(part) for part in path.parts[-3].split(".") if part.isdigit()],
    )
    found = shutil.which(f"python{version}")
    if found is not None and Path(found).parent.name != "shims":  # they run pyenv's chosen version
        return Path(found)
    if not made:
        sys.exit(f"expected python{version} on PATH or in {pyenv_root}/versions; install it")
    return made[-1]


def refusing(version: str, projects: Iterable[Project]) -> list[str]:
    """The packages whose metadata do not allow a Python, or do not name it."""
    line = f"Programming Language :: Python :: {version}"
    return [
        each.name
        for each in projects
        if not SpecifierSet(each.metadata["requires-python"]).contains(f"{version}.0")
        or line not in each.metadata["classifiers"]
    ]


def make_environment(version: str) -> Path:
    """Makes an environment with the three packages and what their tests need; its Python."""
    folder = ROOT / ".nox" / f"python-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter(version), "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "-q", "-c", str(PINS))
    subprocess.run([*pip, *TOOLS, *NEEDED], check=True)
    local = [str(ROOT / "packages" / name) for name in TESTS]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *local], check=True)
    # testkit itself imports torch; tests of imports use this part of it alone.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "testkit").mkdir()
    (site / "testkit" / "__init__.py").touch()
    inspection = ROOT / "testkit" / "src" / "testkit" / "inspection"
    (site / "testkit" / "inspection").symlink_to(inspection)
    return python


def main(version: str) -> int:
    """Makes the environment and tests in it; returns pytest's exit code."""
    if wrong := refusing(version, packages()):
        sys.exit(f"expected metadata that allow Python {version}, got none of {wrong}; add it")
    python = make_environment(version)
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    compiled = ["-W", "error", "-m", "compileall", "-q", "-f", *sources]
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(python.parents[1] / "compiled")}
    subprocess.run([str(python), *compiled], check=True, env=environment)
    # Without conftest.py, which imports testkit; of it hypothesis has the profile of CI.
    options = ["--noconftest", "-p", "no:cacheprovider", *TESTS.values()]
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-m", "pytest", *options]
    return subprocess.run(command, cwd=ROOT, env=alone | {"CI": "1"}).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", metavar="VERSION")
    sys.exit(main(parser.parse_args().version))
