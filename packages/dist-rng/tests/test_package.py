"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import dist_rng

OTHERS = {"dbuffer", "dtensor_rules", "fsdp", "fused_comm", "plan_api", "ragged_shard"}
NOT_LOADED = OTHERS


def loaded_by(statement: str, folder: Path) -> set[str]:
    """Top-level modules that a fresh interpreter without CUDA has loaded after the statement."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return set(run.stdout.split())


def test_version_is_that_of_the_installed_distribution():
    assert dist_rng.__version__ == importlib.metadata.version("dist-rng")


def test_importing_it_loads_no_other_of_our_packages(tmp_path):
    assert not loaded_by("import dist_rng", tmp_path) & NOT_LOADED


def test_that_check_notices_another_of_our_packages(tmp_path):
    assert loaded_by("import dist_rng, ragged_shard", tmp_path) & NOT_LOADED == {"ragged_shard"}
