"""The package as a whole: its version, and what importing it loads."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import fsdp

OTHERS = {"dbuffer", "dist_rng", "dtensor_rules", "fused_comm", "plan_api", "ragged_shard"}
NOT_LOADED = OTHERS | {"torch"}


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
    assert fsdp.__version__ == importlib.metadata.version("fsdp")


def test_importing_it_loads_neither_torch_nor_another_of_our_packages(tmp_path):
    assert not loaded_by("import fsdp", tmp_path) & NOT_LOADED


def test_that_check_notices_another_of_our_packages(tmp_path):
    assert loaded_by("import fsdp, plan_api", tmp_path) & NOT_LOADED == {"plan_api"}
