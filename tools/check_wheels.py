"""Builds every package and tries each wheel alone: ``python -m tools.check_wheels [NAME ...]``.

Each wheel is made from its sdist, installed with its dependencies and nothing else into a clean
environment, checked, imported, and put through its ``tests/smoke.py``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.workspace import ROOT, Project, normalised, packages

DIST = ROOT / "dist"


def needed(name: str, by_name: dict[str, Project]) -> set[str]:
    """The local packages that an installation of ``name`` brings along, itself included."""
    direct = {normalised(requirement) for requirement in by_name[name].dependencies}
    return {name}.union(*(needed(other, by_name) for other in direct & by_name.keys()))


def build(project: Project) -> Path:
    """The project's sdist, then its wheel from that sdist; the wheel's path."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST)]
    command.append(str(project.folder))
    log = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if log.returncode != 0:
        sys.exit(f"{log.stdout.decode()}\n{project.name}: the build failed, see above")
    (wheel,) = DIST.glob(f"{project.name.replace('-', '_')}-*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    for file in ("/py.typed", "/licenses/LICENSE"):
        if not any(name.endswith(file) for name in held):
            sys.exit(f"{wheel.name}: holds no {file[1:]}; see the other packages' pyproject.toml")
    return wheel


def try_alone(project: Project, wheels: dict[str, Path], by_name: dict[str, Project]) -> str:
    """Installs one wheel into a clean environment and runs its smoke test there; what that says."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{project.name}-") as folder:
        python = f"{folder}/env/bin/python"
        # Constraints that are files: a namesake in a package index is never taken for ours.
        local = Path(folder) / "local.txt"
        local.write_text("".join(f"{name} @ {path.as_uri()}\n" for name, path in wheels.items()))

        def run(*command: str | Path) -> str:
            clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            whole = [python, *map(str, command)]
            return subprocess.run(
                whole, cwd=folder, env=clean, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        subprocess.run([sys.executable, "-m", "venv", f"{folder}/env"], check=True)
        pins = ["-c", str(ROOT / "constraints.txt"), "-c", str(local), "--find-links", str(DIST)]
        run("-m", "pip", "install", "-q", "--no-compile", *pins, wheels[project.name])
        run("-m", "pip", "check")
        listed = json.loads(run("-m", "pip", "list", "--format", "json"))
        ours = {normalised(entry["name"]) for entry in listed} & by_name.keys()
        if ours != needed(project.name, by_name):
            sys.exit(f"{project.name}: installed alone it brings {sorted(ours)}: see its pyproject")
        run("-c", f"import {project.source.name}")
        said = run(project.folder / "tests" / "smoke.py")
    return f"{said}{project.name}: works alone ({time.monotonic() - start:.0f} s)"


def main(names: list[str]) -> None:
    """Builds all packages, for they may need one another, and tries those named, or all."""
    by_name = {project.name: project for project in packages()}
    if unknown := set(names) - by_name.keys():
        sys.exit(f"no package {sorted(unknown)}; there are {sorted(by_name)}")
    shutil.rmtree(DIST, ignore_errors=True)
    wheels = {name: build(project) for name, project in by_name.items()}
    print(*(f"built {wheel.name}" for wheel in wheels.values()), sep="\n", flush=True)
    # Two at a time: pip writes torch's files while the other environment computes.
    with ThreadPoolExecutor(max_workers=2) as pool:
        chosen = [by_name[name] for name in names or by_name]
        for said in pool.map(lambda project: try_alone(project, wheels, by_name), chosen):
            print(said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
