"""Measures the peak resident memory of this process."""

import ctypes
import gc
from pathlib import Path

_KIB = 1024


def reset_peak_rss() -> None:
    """Frees unused memory and resets the peak (man 5 proc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Returns the peak resident set of this process, in bytes.

    It is ``VmHWM``, which a new program resets; ``getrusage`` would report the memory of the
    launcher that forked this process, if that was larger.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError("/proc/self/status has no VmHWM line; peak memory is read on Linux only")
