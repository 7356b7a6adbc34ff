"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import dtensor_rules
from testkit.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"dtensor_rules"} | {"torch"}


def test_version_is_that_of_the_installed_distribution():
    assert dtensor_rules.__version__ == importlib.metadata.version("dtensor-rules")


def test_importing_it_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import dtensor_rules") & NOT_LOADED


def test_that_check_notices_another_of_our_packages():
    assert "dist_rng" in loaded_by("import dtensor_rules, dist_rng") & NOT_LOADED


def test_asking_where_the_header_is_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import dtensor_rules; dtensor_rules.get_include()") & NOT_LOADED
