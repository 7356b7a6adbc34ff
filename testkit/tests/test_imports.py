import subprocess

import pytest

import testkit
from testkit.inspection import imports
from testkit.inspection.imports import PACKAGES, loaded_by, run_without_packages


def test_what_a_statement_imports_is_named():
    before, after = loaded_by("pass"), loaded_by("import wave, xml.dom")
    assert after - before >= {"wave", "xml"}


def test_what_this_interpreter_has_loaded_is_not_reported():
    assert testkit.__name__ not in loaded_by("pass")


def test_a_statement_that_fails_raises(capfd):
    with pytest.raises(subprocess.CalledProcessError):
        loaded_by("import there_is_no_such_module")
    assert "there_is_no_such_module" in capfd.readouterr().err


def test_commands_have_torch_but_none_of_the_packages_imported(monkeypatch):
    code = "import sys; print('torch' in sys.modules, 'fsdp' in sys.modules, *sys.argv[1:])"
    assert run_without_packages("-c", code, "more").stdout == "True False more\n"
    monkeypatch.setattr(imports, "preloaded", lambda: ("transformers", "fsdp.optim"))
    assert run_without_packages("-c", code, "more").stdout == "False False more\n"


def test_the_packages_are_those_of_the_workspace(pytestconfig):
    folders = pytestconfig.rootpath.glob("packages/*/pyproject.toml")
    assert {path.parent.name.replace("-", "_") for path in folders} == PACKAGES
