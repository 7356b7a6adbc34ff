"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import ragged_shard
from testkit.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"ragged_shard"} | {"torch"}


def test_version_is_that_of_the_installed_distribution():
    assert ragged_shard.__version__ == importlib.metadata.version("ragged-shard")


def test_importing_it_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import ragged_shard") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "dist_rng" in loaded_by("import ragged_shard, dist_rng") & NOT_LOADED
