"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import pytest

import dtensor_rules
from testkit import run_python
from testkit.inspection.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"dtensor_rules"} | {"torch"}


def test_version_is_that_of_the_installed_distribution():
    assert dtensor_rules.__version__ == importlib.metadata.version("dtensor-rules")


def test_importing_it_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import dtensor_rules") & NOT_LOADED


def test_asking_where_the_header_is_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import dtensor_rules; dtensor_rules.get_include()") & NOT_LOADED


@pytest.mark.ranks
def test_on_another_torch_that_is_said_before_the_extension_module_is_loaded():
    code = """
import sys, types
sys.modules["dtensor_rules._built_for"] = types.SimpleNamespace(TORCH_VERSION="1.0.0")
import dtensor_rules
try:
    dtensor_rules.enable
except ImportError as error:
    assert "dtensor_rules was compiled for torch 1.0" in str(error), error
else:
    raise AssertionError("nothing was said")
assert "dtensor_rules._core" not in sys.modules
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
