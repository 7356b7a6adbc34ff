"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata

import pytest

import ragged_shard
from testkit.inspection.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"ragged_shard"} | {"torch"}


def test_version_is_that_of_the_installed_distribution():
    assert ragged_shard.__version__ == importlib.metadata.version("ragged-shard")


def test_importing_it_loads_neither_torch_nor_another_of_our_packages():
    assert not loaded_by("import ragged_shard") & NOT_LOADED


def test_every_public_name_is_there_and_no_other():
    assert set(ragged_shard.__all__) <= set(dir(ragged_shard))
    for name in ragged_shard.__all__:
        assert getattr(ragged_shard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'RaggedShart'"):
        ragged_shard.RaggedShart  # noqa: B018
