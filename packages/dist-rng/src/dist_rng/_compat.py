"""The differences between the torch releases that dist-rng supports.

``cpu/self_check.py`` compares with torch before the first use of every operation and dtype, so an
error in this table is found.
"""

import torch

from dist_rng._core import TorchRelease

# The release whose bits each release draws on a CPU. Only uniform_ and normal_ have changed:
# 2.11 draws bf16 and f16 in their own precision, and its uniform_ may return the upper bound;
# 2.12 draws them in float, but computes their normals with the C library in every build;
# 2.13 has one vectorised form for all, with an explicit fma where 2.12 depends on the build.
CPU_RELEASES = {
    (2, 11): TorchRelease.torch_2_11,
    (2, 12): TorchRelease.torch_2_12,
    (2, 13): TorchRelease.torch_2_13,
    (2, 14): TorchRelease.torch_2_13,
    (2, 15): TorchRelease.torch_2_13,
}


def torch_release() -> tuple[int, int]:
    """Returns torch's major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cpu_release() -> TorchRelease:
    """Returns the release whose bits the installed torch draws on a CPU.

    Raises:
        RuntimeError: the release is not in the table.
    """
    release = torch_release()
    if release not in CPU_RELEASES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CPU_RELEASES)
        raise RuntimeError(
            f"expected torch {known}, whose random numbers on a CPU dist-rng reproduces, got"
            f" {torch.__version__}; install one of those, or a newer dist-rng"
        )
    return CPU_RELEASES[release]
