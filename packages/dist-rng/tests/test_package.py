"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import dist_rng
from testkit.inspection.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"dist_rng"}


def test_version_is_that_of_the_installed_distribution():
    assert dist_rng.__version__ == importlib.metadata.version("dist-rng")


def test_importing_it_loads_no_other_of_our_packages():
    assert not loaded_by("import dist_rng") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "ragged_shard" in loaded_by("import dist_rng, ragged_shard") & NOT_LOADED
