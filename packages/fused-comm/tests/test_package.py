"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import fused_comm
from testkit.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"fused_comm"}


def test_version_is_that_of_the_installed_distribution():
    assert fused_comm.__version__ == importlib.metadata.version("fused-comm")


def test_importing_it_loads_no_other_of_our_packages():
    assert not loaded_by("import fused_comm") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "dbuffer" in loaded_by("import fused_comm, dbuffer") & NOT_LOADED
