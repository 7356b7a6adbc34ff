"""What differs between the torch releases that dist-rng supports, in one table.

Nothing here is trusted blindly: ``cpu_check`` compares with torch before the first use of every
operation and dtype.
"""

import torch

from dist_rng._core import Release

# Whose bits each release draws on a CPU. Only uniform_ and normal_ ever changed:
# 2.11 draws bf16 and f16 in their own precision, and its uniform_ may return the upper bound;
# 2.12 draws them in float, but makes their normals with the C library in every build;
# 2.13 has one vectorised form for all, with an fma of its own where 2.12 leaves it to the build.
CPU_RELEASES = {
    (2, 11): Release.torch_2_11,
    (2, 12): Release.torch_2_12,
    (2, 13): Release.torch_2_13,
    (2, 14): Release.torch_2_13,
    (2, 15): Release.torch_2_13,
}


def torch_release() -> tuple[int, int]:
    """Return torch's major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cpu_release() -> Release:
    """Return whose bits the installed torch draws on a CPU.

    Raises:
        RuntimeError: the release is not in the table.
    """
    release = torch_release()
    if release not in CPU_RELEASES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CPU_RELEASES)
        raise RuntimeError(
            f"dist-rng knows how torch {known} draw on a CPU, not {torch.__version__}; install"
            " one of those, or a newer dist-rng"
        )
    return CPU_RELEASES[release]
