"""Measures the peak of host memory that torch allocates during a call."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = ["peak_bytes"]

T = TypeVar("T")


def peak_bytes(action: Callable[[], T]) -> tuple[int, T]:
    """Measures the peak of allocated host memory, above what was allocated before the call.

    The allocated bytes are read whenever the calling thread allocates or frees, and include those
    of other threads, as gloo's threads free what they send. Cached pages of the process do not
    count, nor do releases of memory that was allocated before the first call of this function.

    Returns:
        the peak in bytes, and the result of the call.
    """
    _count_all_threads()
    gc.collect()  # what others left in cycles would be released in the middle
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        torch.empty(1, dtype=torch.int8)  # the first event has the bytes allocated before the call
        result = action()
    allocated = list(_allocated(profiler.profiler.kineto_results.experimental_event_tree()))
    return max(allocated) - allocated[0] + 1, result


def _count_all_threads() -> None:
    """Sets the flag with which torch counts all threads, not only those that are profiled.

    It remains set, so that later calls know the sizes of what they release.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _allocated(events: Iterable[Any]) -> Iterator[int]:
    """Yields the allocated bytes after each allocation and release, in order."""
    for event in events:
        if event.name == "[memory]":
            yield event.extra_fields.total_allocated
        yield from _allocated(event.children)
