"""Collectives let go of their tensors before the interpreter shuts down.

A worker thread of gloo's drops the tensors of a collective some time after `wait` has returned,
and takes the GIL for it where Python knows them. If the interpreter begins to shut down meanwhile,
that ends the process by SIGABRT (https://github.com/pytorch/pytorch/issues/190489), whatever its
exit code was to be. So a collective of this package gets aliases that nothing else has: they live
as long as the collective, and the process does not shut down before they are gone.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from itertools import count
from weakref import WeakValueDictionary

import torch

__all__ = ["alias"]

_WAIT = 2.0  # seconds for what is in flight; others may never take part

_number = count()
_alive: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor for one collective and nothing else; the process waits for it."""
    _register()
    made = tensor.detach()
    _alive[next(_number)] = made
    return made


@cache
def _register() -> None:
    atexit.register(_wait)


def _wait() -> None:
    end = time.monotonic() + _WAIT
    while _alive and time.monotonic() < end:
        time.sleep(0.001)  # workers have the GIL
