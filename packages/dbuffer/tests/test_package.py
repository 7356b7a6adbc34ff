"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import dbuffer
from testkit.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"dbuffer", "ragged_shard"} | {"matplotlib"}


def test_version_is_that_of_the_installed_distribution():
    assert dbuffer.__version__ == importlib.metadata.version("dbuffer")


def test_importing_it_loads_none_of_our_packages_but_ragged_shard():
    assert not loaded_by("import dbuffer") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "fused_comm" in loaded_by("import dbuffer, fused_comm") & NOT_LOADED


def test_every_public_name_is_there():
    assert all(hasattr(dbuffer, name) for name in dbuffer.__all__)
