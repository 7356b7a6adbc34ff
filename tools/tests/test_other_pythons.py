"""tools.other_pythons: which interpreter, which metadata, and that its tests need no torch."""

import subprocess
import sys

import pytest

from tools import other_pythons
from tools.other_pythons import TESTS, interpreter, refusing
from tools.workspace import ROOT, Project, packages


def pyenv(root, *versions):
    for version in versions:
        python = root / "versions" / version / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    return root


def test_the_newest_of_pyenvs_is_taken_where_path_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(other_pythons.shutil, "which", lambda name: None)
    root = pyenv(tmp_path, "3.12.9", "3.12.10", "3.13.0")
    assert interpreter("3.12", root).parts[-3] == "3.12.10"
    monkeypatch.setenv("PYENV_ROOT", str(root))
    assert interpreter("3.13").parts[-3] == "3.13.0"
    with pytest.raises(SystemExit, match=r"expected python3\.14 on PATH or in"):
        interpreter("3.14", root)


def test_a_shim_of_pyenv_is_not_taken_but_another_python_on_path_is(tmp_path, monkeypatch):
    root = pyenv(tmp_path, "3.12.1")
    found = {"python3.12": str(root / "shims" / "python3.12"), "python3.13": "/usr/bin/python3.13"}
    monkeypatch.setattr(other_pythons.shutil, "which", found.get)
    assert interpreter("3.12", root).parts[-3] == "3.12.1"
    assert str(interpreter("3.13", root)) == "/usr/bin/python3.13"


def project(folder, requires, *versions):
    lines = ", ".join(f'"Programming Language :: Python :: {version}"' for version in versions)
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{folder.name}"\nrequires-python = "{requires}"\n'
        f"classifiers = [{lines}]\n"
    )
    return Project(folder)


def test_metadata_that_exclude_a_python_or_do_not_name_it_are_found(tmp_path):
    projects = [
        project(tmp_path / "good", ">=3.11,<3.14", "3.11", "3.13"),
        project(tmp_path / "excludes", ">=3.11,<3.13", "3.13"),
        project(tmp_path / "unnamed", ">=3.11,<3.14", "3.11"),
    ]
    assert refusing("3.13", projects) == ["excludes", "unnamed"]
    assert refusing("3.13", packages()) == []


def test_these_tests_import_no_torch():
    """A finder without torch stands for an environment without it."""
    code = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'torch' else find(name)\n"
        "import runpy\n"
        "for path in sys.argv[1:]: runpy.run_path(path)\n"
    )
    files = [str(ROOT / path) for path in TESTS.values() if path.endswith(".py")]
    assert len(files) == 2
    subprocess.run([sys.executable, "-c", code, *files], check=True)
