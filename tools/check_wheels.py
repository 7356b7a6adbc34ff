"""Builds packages and tries each wheel alone: ``python -m tools.check_wheels [NAME ...]``.

Each wheel is made from its sdist, installed with its dependencies and nothing else into a clean
environment, checked, imported, put through its ``tests/smoke.py``, and then runs what
``docs/packages/*/example.md`` shows of it, with what that asks for beside the package.

The clean environments share torch, what it needs, and pip: an installation of torch takes a minute.
With ``--stacked`` they see what is installed where this command runs instead: this is
how ``nox -s "compat(2.15)"`` tries them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tools import examples
from tools.build_wheel import unchanged_wheel
from tools.workspace import ROOT, Project, needed, normalised, packages


@dataclass(frozen=True)
class Options:
    """How wheels are built and tried.

    Attributes:
        dist: where they go; what was there goes away.
        pins: pip's constraints.
        stacked: clean environments see the packages of the present one, instead of torch alone.
    """

    dist: Path = ROOT / "dist"
    pins: Path = ROOT / "constraints.txt"
    stacked: bool = False


def clean_environment(folder: Path, shared: Path) -> Path:
    """Makes an environment that sees the packages of a folder, pip's; the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{shared}\n")
    return folder / "bin" / "python"


def with_requirements(*names: str) -> dict[str, Distribution]:
    """Installed distributions and what they require, without extras, by normalised name."""
    found: dict[str, Distribution] = {}
    left = list(names)
    while left:
        if (name := normalised(left.pop())) not in found:
            found[name] = distribution(name)
            required = map(Requirement, found[name].requires or ())
            left += [
                each.name
                for each in required
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def torch_alone(folder: Path) -> Path:
    """Links torch, what it needs, and pip, from where this runs, with their bytecode; the folder.

    An environment of its own would take as long to install, and each process there would compile
    torch where PYTHONDONTWRITEBYTECODE is set.
    """
    site = Path(sysconfig.get_path("purelib"))
    for each in with_requirements("torch", "pip").values():
        parts = [file.parts for file in each.files or ()]
        # Other files are scripts, which are beside the packages.
        for name in {first for first, *_ in parts if first not in ("..", "__pycache__")}:
            link = folder / name
            if not link.exists():  # another distribution may have files there, too
                link.symlink_to(site / name)
    return folder


def try_alone(
    project: Project,
    wheels: dict[str, Path],
    by_name: dict[str, Project],
    options: Options,
    shared: Path,
) -> str:
    """Installs one wheel into a clean environment and tries it there; what its smoke test says."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{project.name}-") as name:
        folder = Path(name)
        python = clean_environment(folder / "env", shared)
        # Constraints that are files: a namesake in a package index is never installed.
        local = folder / "local.txt"
        local.write_text("".join(f"{name} @ {path.as_uri()}\n" for name, path in wheels.items()))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(*command: str | Path) -> str:
            whole = [str(python), *map(str, command)]
            return subprocess.run(
                whole, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        def install(*what: str | Path) -> None:
            pins: tuple[str | Path, ...] = ("-c", options.pins, "-c", local)
            found = ("--find-links", options.dist)
            run("-m", "pip", "install", "-q", "--no-compile", *pins, *found, *what)

        install(wheels[project.name])
        run("-m", "pip", "check")
        listed = json.loads(run("-m", "pip", "list", "--format", "json"))
        brought = {normalised(entry["name"]) for entry in listed} & by_name.keys()
        if brought != needed(project.name, by_name):
            sys.exit(f"{project.name}: alone it brings {sorted(brought)}: see its pyproject")
        run("-c", f"import {project.source.name}")
        output = run(project.folder / "tests" / "smoke.py")
        shown = examples.examples(project.name)
        asked = {requirement for example in shown for requirement in example.dependencies}
        if others := [each for each in asked if normalised(each) not in by_name]:
            install(*sorted(others))
        for example in shown:
            examples.run(example, folder, python=str(python), env=env)
    took = time.monotonic() - start
    return f"{output}{project.name}: works alone, as its example shows it ({took:.0f} s)"


def main(names: list[str], options: Options) -> None:
    """Builds the packages named, or all, with those that they need, and tries those named."""
    by_name = {project.name: project for project in packages()}
    if unknown := set(names) - by_name.keys():
        sys.exit(f"no package {sorted(unknown)}; there are {sorted(by_name)}")
    chosen = names or list(by_name)
    wanted = set[str]().union(*(needed(name, by_name) for name in chosen))
    shutil.rmtree(options.dist, ignore_errors=True)
    options.dist.mkdir(parents=True)
    wheels = {}
    for name in sorted(wanted):
        for made in unchanged_wheel(by_name[name]).parent.iterdir():  # the sdist, too
            shutil.copy(made, options.dist)
        (wheels[name],) = options.dist.glob(f"{name.replace('-', '_')}-*.whl")
        print(f"built {wheels[name].name}", flush=True)
    # Two at a time: pip writes files while the other environment computes.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        present = Path(sysconfig.get_path("purelib"))
        shared = present if options.stacked else torch_alone(Path(folder))

        def tried(name: str) -> str:
            return try_alone(by_name[name], wheels, by_name, options, shared)

        for output in pool.map(tried, chosen):
            print(output, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--dist", type=Path, default=Options.dist)
    parser.add_argument("--pins", type=Path, default=Options.pins)
    parser.add_argument("--stacked", action="store_true")
    given = parser.parse_args()
    # What is run in other folders gets these.
    main(given.names, Options(given.dist.resolve(), given.pins.resolve(), given.stacked))
