"""Makes ``tools`` importable: it is the one tested folder that is not installed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

REQUIREMENTS = {
    "dbuffer": ["ragged-shard>=0.1,<0.2"],
    "fsdp": ["dbuffer>=0.1,<0.2", "fused-comm>=0.1,<0.2", "ragged-shard>=0.1,<0.2"],
}
EXTRAS = {
    "plan-api": ["dist-rng", "dtensor-rules", "fused-comm", "ragged-shard"],
    "fsdp": ["dist-rng", "dtensor-rules"],
}


def write_project(folder: Path, name: str, requirements: list[str], extras: list[str]) -> None:
    source = folder / "src" / folder.name.replace("-", "_")
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "0.1.0"\ndependencies = {requirements}\n'
        f"optional-dependencies.all = {extras}\n"
    )


@pytest.fixture
def workspace(tmp_path):
    """A small workspace in which all is well: every project, with nothing in it."""
    names = ["dist-rng", "dtensor-rules", "fused-comm", "ragged-shard", "plan-api"]
    for name in (*names, "dbuffer", "fsdp"):
        requirements = ["torch>=2.11,<2.16", *REQUIREMENTS.get(name, [])]
        extras = [f"{extra}>=0.1,<0.2" for extra in EXTRAS.get(name, [])]
        write_project(tmp_path / "packages" / name, name, requirements, extras)
    for name in ("testkit", "integration"):
        write_project(tmp_path / name, f"spmd-{name}", [], [])
    return tmp_path
