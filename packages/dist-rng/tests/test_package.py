"""The version of the package, and what its import loads."""

import importlib.metadata

import dist_rng
from testkit.inspection.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"dist_rng"}


def test_version_is_that_of_the_installed_distribution():
    assert dist_rng.__version__ == importlib.metadata.version("dist-rng")


def test_import_loads_no_other_package_of_the_workspace():
    assert not loaded_by("import dist_rng", after_torch=True) & NOT_LOADED
