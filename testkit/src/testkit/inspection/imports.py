"""Finds the modules that importing a package loads, in a new process."""

import contextlib
import os
import subprocess
import sys
import tempfile

#: The import names of the workspace's packages.
PACKAGES = frozenset(
    {"dbuffer", "dist_rng", "dtensor_rules", "fsdp", "fused_comm", "plan_api", "ragged_shard"}
)


def loaded_by(statement: str, *, after_torch: bool = False) -> set[str]:
    """Returns the top-level modules that a new interpreter without CUDA loads for a statement.

    The interpreter starts in an empty folder, so that only installed packages are found.

    Args:
        statement: Python source, such as ``"import torch"``.
        after_torch: runs the statement where torch and testkit are loaded already, in a fork, which
            saves the seconds that importing torch takes; their modules are in the result.

    Raises:
        subprocess.CalledProcessError: the statement failed; its traceback is on stderr.
    """
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if after_torch:
            from testkit.ranks.python_command import run_python  # loads torch

            run = run_python("-c", code, environment=environment, preloaded=False)
        else:
            run = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                check=False,
                capture_output=True,
                text=True,
            )
    sys.stderr.write(run.stderr)
    run.check_returncode()
    return set(run.stdout.split())
