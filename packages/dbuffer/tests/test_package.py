"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import dbuffer
from testkit.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"dbuffer"} | {"torch"}


def test_version_is_that_of_the_installed_distribution():
    assert dbuffer.__version__ == importlib.metadata.version("dbuffer")


def test_importing_it_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import dbuffer") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "fsdp" in loaded_by("import dbuffer, fsdp") & NOT_LOADED
