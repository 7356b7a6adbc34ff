"""What the workspace holds: its distributions, and what influences the build of each."""

import functools
import hashlib
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Changes here change nothing in a wheel. A list of what to leave out, rather than of what to
# take, because a forgotten entry then costs a needless reinstall and not a stale one.
NOT_BUILT = {"tests", "benchmarks", "build", "dist", "CHANGELOG.md"}
NOT_SOURCE = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}


def normalised(requirement: str) -> str:
    """The distribution's name in a requirement: ``Dist_RNG[x]>=0.1`` gives ``dist-rng``."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if found is None:
        raise ValueError(f"no distribution name in requirement {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def commit_of_tree(record: str) -> str:
    """The commit of the working tree, with -dirty where more than a record differs from it.

    Args:
        record: a pattern of files, from the root, that the run itself writes.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{record}")
    return git("describe", "--always", "--abbrev=7") + ("-dirty" if changed else "")


@dataclass(frozen=True)
class Project:
    """A folder that is one distribution."""

    folder: Path

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The ``[project]`` table of its pyproject.toml."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())
        return dict(table["project"])

    @property
    def name(self) -> str:
        """The distribution's name, normalised."""
        return normalised(self.metadata["name"])

    @property
    def dependencies(self) -> list[str]:
        """Its requirements, extras apart."""
        return list(self.metadata.get("dependencies", []))

    @property
    def extras(self) -> list[str]:
        """The requirements of all its extras."""
        groups = self.metadata.get("optional-dependencies", {})
        return [requirement for group in groups.values() for requirement in group]

    @property
    def source(self) -> Path:
        """The folder of its import package."""
        (package,) = (init.parent for init in self.folder.glob("src/*/__init__.py"))
        return package

    def content_hash(self) -> str:
        """A digest of every file that can influence its wheel."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            inner = path.relative_to(self.folder).parts
            if inner[0] in NOT_BUILT or NOT_SOURCE.intersection(inner) or not path.is_file():
                continue
            digest.update("/".join(inner).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


def packages(root: Path = ROOT) -> list[Project]:
    """The published packages, by name."""
    return [Project(found.parent) for found in sorted(root.glob("packages/*/pyproject.toml"))]


def projects(root: Path = ROOT) -> list[Project]:
    """The packages and the two distributions that only this repository uses."""
    return [*packages(root), Project(root / "testkit"), Project(root / "integration")]


def needed(name: str, by_name: dict[str, Project]) -> set[str]:
    """The local packages that an installation of ``name`` brings along, itself included."""
    direct = {normalised(requirement) for requirement in by_name[name].dependencies}
    return {name}.union(*(needed(other, by_name) for other in direct & by_name.keys()))
