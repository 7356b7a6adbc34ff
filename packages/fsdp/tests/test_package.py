"""The version of the package, and what its import loads."""

import importlib.metadata

import fsdp
from testkit.inspection.imports import PACKAGES, loaded_by

NEEDED = {"fsdp", "dbuffer", "fused_comm", "ragged_shard"}
NOT_LOADED = PACKAGES - NEEDED


def test_version_is_that_of_the_installed_distribution():
    assert fsdp.__version__ == importlib.metadata.version("fsdp")


def test_import_loads_only_required_sibling_packages():
    assert not loaded_by("import fsdp", after_torch=True) & NOT_LOADED
