"""What importing a package loads, seen from a fresh interpreter."""

import os
import subprocess
import sys
import tempfile

#: The import names of the workspace's packages.
PACKAGES = frozenset(
    {"dbuffer", "dist_rng", "dtensor_rules", "fsdp", "fused_comm", "plan_api", "ragged_shard"}
)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter without CUDA has loaded after a statement.

    The interpreter starts in an empty folder, so that only what is installed is found.

    Args:
        statement: Python source, such as ``"import torch"``.

    Raises:
        subprocess.CalledProcessError: The statement failed; its traceback is on stderr.
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
