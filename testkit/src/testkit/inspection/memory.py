"""The peak of host memory that torch's allocator has allocated during a call."""

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
    """The most bytes of the host that are allocated at once, above those before, and the result.

    It is read whenever the calling thread allocates or frees, and counts what all threads hold:
    gloo's free much of what they send. Freed tensors count until they are freed; pages that the
    process keeps do not, nor do releases of what was allocated before the first call.
    """
    _count_all_threads()
    gc.collect()  # what others left in cycles would be released in the middle
    with torch.profiler.profile(profile_memory=True) as profiler:
        torch.empty(1, dtype=torch.int8)  # the first event tells what is allocated before
        result = action()
    allocated = list(_allocated(profiler.profiler.kineto_results.experimental_event_tree()))
    return max(allocated) - allocated[0] + 1, result


def _count_all_threads() -> None:
    """From now on; torch counts only the threads that are profiled without this flag of its own.

    It stays set, so that a later call knows the sizes of what is released in it.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _allocated(events: Iterable[Any]) -> Iterator[int]:
    """Bytes allocated after each allocation and release, in order."""
    for event in events:
        if event.name == "[memory]":
            yield event.extra_fields.total_allocated
        yield from _allocated(event.children)
