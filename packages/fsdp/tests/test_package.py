"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import fsdp
from testkit.inspection.imports import PACKAGES, loaded_by

NEEDED = {"fsdp", "dbuffer", "fused_comm", "ragged_shard"}
NOT_LOADED = PACKAGES - NEEDED


def test_version_is_that_of_the_installed_distribution():
    assert fsdp.__version__ == importlib.metadata.version("fsdp")


def test_importing_it_loads_none_of_our_packages_but_what_it_needs():
    assert not loaded_by("import fsdp") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "plan_api" in loaded_by("import fsdp, plan_api") & NOT_LOADED
