import subprocess

import pytest

import testkit
from testkit.inspection.imports import PACKAGES, loaded_by


def test_what_a_statement_imports_is_named():
    before, after = loaded_by("pass"), loaded_by("import wave, xml.dom")
    assert after - before >= {"wave", "xml"}


def test_a_statement_may_run_where_torch_is_loaded_already():
    before, after = (loaded_by(code, after_torch=True) for code in ("pass", "import wave"))
    assert {"torch", "testkit"} <= before
    assert after - before == {"wave"}
    assert not before & PACKAGES


def test_what_this_interpreter_has_loaded_is_not_reported():
    assert testkit.__name__ not in loaded_by("pass")


def test_a_statement_that_fails_raises(capfd):
    with pytest.raises(subprocess.CalledProcessError):
        loaded_by("import there_is_no_such_module")
    assert "there_is_no_such_module" in capfd.readouterr().err


def test_the_packages_are_those_of_the_workspace(pytestconfig):
    folders = pytestconfig.rootpath.glob("packages/*/pyproject.toml")
    assert {path.parent.name.replace("-", "_") for path in folders} == PACKAGES
