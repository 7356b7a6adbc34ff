import pytest

from tools.workspace import needed, normalised, packages, projects


@pytest.mark.parametrize("text", ["Dist_RNG", "dist-rng[x] >=0.1", "dist.rng@file:///a"])
def test_a_requirement_is_read_for_its_name(text):
    assert normalised(text) == "dist-rng"


def test_the_projects_are_the_packages_testkit_and_integration(workspace):
    names = [project.name for project in projects(workspace)]
    assert names[-2:] == ["spmd-testkit", "spmd-integration"]
    assert len(names) == len(packages(workspace)) + 2 == 9


@pytest.mark.parametrize(
    ("name", "brought"),
    [
        ("dist-rng", {"dist-rng"}),
        ("plan-api", {"plan-api"}),
        ("fsdp", {"fsdp", "dbuffer", "ragged-shard", "fused-comm"}),
    ],
)
def test_a_package_brings_what_it_declares_and_no_extra(workspace, name, brought):
    assert needed(name, {project.name: project for project in packages(workspace)}) == brought


@pytest.mark.parametrize("path", ["src/dbuffer/a.py", "include/a.h", "CMakeLists.txt", "README.md"])
def test_the_hash_changes_with(workspace, path):
    assert changes_hash(workspace, path)


@pytest.mark.parametrize(
    "path", ["tests/test_a.py", "benchmarks/run.py", "build/x.o", "CHANGELOG.md"]
)
def test_the_hash_stays_with(workspace, path):
    assert not changes_hash(workspace, path)


def changes_hash(workspace, path: str) -> bool:
    (project,) = (project for project in packages(workspace) if project.name == "dbuffer")
    before = project.content_hash()
    (project.folder / path).parent.mkdir(exist_ok=True)
    (project.folder / path).write_text("new")
    return project.content_hash() != before
