"""What torch's allocators hold while something is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["peak_bytes"]

T = TypeVar("T")


def peak_bytes(action: Callable[[], T]) -> tuple[int, T]:
    """The most bytes that are held at once, above what was held before, and what is returned.

    Freed tensors count until they are freed; pages that the process keeps do not.
    """
    with torch.profiler.profile(profile_memory=True) as profiler:
        result = action()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, result
