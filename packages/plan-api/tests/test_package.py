"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import plan_api
from testkit.inspection.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"plan_api"}


def test_version_is_that_of_the_installed_distribution():
    assert plan_api.__version__ == importlib.metadata.version("plan-api")


def test_importing_it_loads_no_sibling_package():
    assert not loaded_by("import plan_api", after_torch=True) & NOT_LOADED
