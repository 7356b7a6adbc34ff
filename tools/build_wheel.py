"""Builds a project's sdist, and its wheel from that sdist.

To compile takes minutes, and a new development environment and the check of the wheels need the
same wheels: `unchanged_wheel` leaves each in ``.nox/wheels`` and builds it again when a file of the
project, the interpreter, torch or a tool of the build is another.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.workspace import ROOT, Project

__all__ = ["build", "unchanged_wheel"]

WHEELS = ROOT / ".nox" / "wheels"
# What a wheel is compiled for and by.
_TARGET = """
import sys
from importlib.metadata import version
print(sys.version, sys.prefix, *map(version, ("torch", "pybind11", "scikit-build-core")))
"""


def build(project: Project, dist: Path, python: str | Path = sys.executable) -> Path:
    """Builds both into a folder.

    Args:
        project: what to build.
        dist: the folder.
        python: an interpreter that has what the build needs; its torch is compiled against.

    Returns:
        the wheel's path.

    Raises:
        SystemExit: the build fails, or the wheel has no py.typed or LICENSE.
    """
    command = [str(python), "-m", "build", "--no-isolation", "--outdir", str(dist)]
    command.append(str(project.folder))
    log = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if log.returncode != 0:
        sys.exit(f"{log.stdout.decode()}\n{project.name}: the build failed, see above")
    (wheel,) = dist.glob(f"{project.name.replace('-', '_')}-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("/py.typed", "/licenses/LICENSE"):
        if not any(name.endswith(file) for name in names):
            sys.exit(f"{wheel.name}: holds no {file[1:]}; see the other packages' pyproject.toml")
    return wheel


def unchanged_wheel(project: Project, python: str | Path = sys.executable) -> Path:
    """The project's wheel, which `build` makes if there is none of these files yet.

    Args:
        project: what to build.
        python: as in `build`.

    Returns:
        the wheel's path, in a folder that holds nothing else but the sdist.

    Raises:
        SystemExit: see `build`.
    """
    target = subprocess.run([str(python), "-c", _TARGET], check=True, stdout=subprocess.PIPE).stdout
    key = hashlib.sha256(target + project.content_hash().encode()).hexdigest()[:16]
    folder = WHEELS / project.name / key
    if not (found := list(folder.glob("*.whl"))):
        shutil.rmtree(folder.parent, ignore_errors=True)  # of earlier files
        made = build(project, folder.with_name(f"{key}.part"), python)
        made.parent.rename(folder)  # only now: a build that is killed leaves nothing to take
        return folder / made.name
    return found[0]
