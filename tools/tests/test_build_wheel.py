"""A wheel is built again when something that it is made of has changed, and only then."""

import pytest

from tools import build_wheel
from tools.build_wheel import unchanged_wheel
from tools.workspace import Project

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny-one"
version = "0.1.0"
"""
# Takes tenths of a second; that of the packages is in test_release.py.
BACKEND = """
import tarfile, zipfile

def build_sdist(directory, config_settings=None):
    with tarfile.open(f"{directory}/tiny_one-0.1.0.tar.gz", "w:gz") as archive:
        archive.add(".", "tiny_one-0.1.0")
        archive.add("pyproject.toml", "tiny_one-0.1.0/PKG-INFO")  # which has to be there
    return "tiny_one-0.1.0.tar.gz"

def build_wheel(directory, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{directory}/tiny_one-0.1.0-py3-none-any.whl", "w") as archive:
        archive.write("src/tiny_one/py.typed", "tiny_one/py.typed")
        archive.write("LICENSE", "tiny_one-0.1.0.dist-info/licenses/LICENSE")
    return "tiny_one-0.1.0-py3-none-any.whl"
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "tiny-one"
    source = folder / "src" / "tiny_one"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "py.typed").write_text("")
    (folder / "LICENSE").write_text("Take it.\n")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    monkeypatch.setattr(build_wheel, "WHEELS", tmp_path / "wheels")
    return Project(folder)


def test_a_wheel_is_built_once_for_the_same_files(project):
    first = unchanged_wheel(project)
    built = first.stat().st_mtime_ns
    (project.folder / "tests").mkdir()
    (project.folder / "tests" / "test_x.py").write_text("")  # which no wheel has
    assert unchanged_wheel(project) == first
    assert first.stat().st_mtime_ns == built
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".gz", ".whl"]


def test_a_changed_file_is_built_anew_and_the_wheel_before_is_removed(project):
    first = unchanged_wheel(project)
    (project.source / "__init__.py").write_text("x = 1\n")
    second = unchanged_wheel(project)
    assert second.is_file()
    assert not first.exists()


def test_another_torch_or_interpreter_has_a_wheel_of_its_own(project, monkeypatch):
    monkeypatch.setattr(
        build_wheel, "build", lambda project, dist, python: dist.mkdir(parents=True) or dist / "x"
    )
    first = unchanged_wheel(project)
    monkeypatch.setattr(build_wheel, "_TARGET", 'print("another")')
    assert unchanged_wheel(project).parent != first.parent


def test_a_build_that_fails_leaves_no_wheel(project):
    (project.folder / "LICENSE").unlink()
    with pytest.raises(SystemExit, match="tiny-one: the build failed"):
        unchanged_wheel(project)
    (project.folder / "LICENSE").write_text("Take it.\n")
    assert unchanged_wheel(project).is_file()
