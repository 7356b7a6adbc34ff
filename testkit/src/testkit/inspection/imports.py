"""Finds the modules that importing a package loads, and runs commands without the packages."""

import os
import subprocess
import sys
import tempfile

from testkit.ranks import run_python
from testkit.ranks.forkserver import preloaded

#: The import names of the workspace's packages.
PACKAGES = frozenset(
    {"dbuffer", "dist_rng", "dtensor_rules", "fsdp", "fused_comm", "plan_api", "ragged_shard"}
)


def loaded_by(statement: str) -> set[str]:
    """Returns the top-level modules that a new interpreter without CUDA loads for a statement.

    The interpreter starts in an empty folder, so that only installed packages are found.

    Args:
        statement: Python source, such as ``"import torch"``.

    Raises:
        subprocess.CalledProcessError: the statement failed; its traceback is on stderr.
    """
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return set(run.stdout.split())


def run_without_packages(
    *arguments: str, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS`` in a process that begins with none of `PACKAGES` imported.

    That is `run_python`, which has imported torch, unless `preload` has one of them imported there
    too; then it is a new interpreter.

    Args:
        *arguments: those of `run_python`.
        timeout: seconds after which the command is killed.

    Returns:
        its exit code and output.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    if PACKAGES.isdisjoint(name.partition(".")[0] for name in preloaded()):
        return run_python(*arguments, timeout=timeout)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout
    )
