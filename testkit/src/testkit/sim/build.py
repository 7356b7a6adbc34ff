"""Compiles the simulated device's extension for the installed torch, once per content and torch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "cpp"


def extension() -> ModuleType:
    """The compiled extension; compiles it if no process has, in about a minute.

    It is kept in ``SIM_CACHE``, by default ``~/.cache/testkit-sim``, in a folder named after the
    sources and torch's version. A lock lets one process compile and others wait.
    """
    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(torch.__version__.encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    name = f"testkit_sim_{digest.hexdigest()[:16]}"
    cache = Path(os.environ.get("SIM_CACHE", Path.home() / ".cache" / "testkit-sim"))
    try:
        (cache / name).mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        cache = Path(tempfile.gettempdir()) / f"testkit-sim-{os.getuid()}"
        (cache / name).mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name=name,
        sources=[str(file) for file in files if file.suffix == ".cpp"],
        extra_cflags=["-O1", "-std=c++20"],
        build_directory=str(cache / name),
    )
