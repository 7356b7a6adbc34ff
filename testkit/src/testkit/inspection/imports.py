"""Finds the modules that importing a package loads, in a new interpreter."""

import os
import subprocess
import sys
import tempfile

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
