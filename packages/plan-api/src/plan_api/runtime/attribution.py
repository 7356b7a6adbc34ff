"""Attributes communication to the plan: the patch point through which `track` observes it.

Redistributions and gradient reductions use it only where they are about to communicate, so a hook
that moves nothing pays nothing; without an observer it costs reading a global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import SiteStep

__all__ = [
    "CommunicationCause", "is_preparing", "moving", "preparing", "reducing", "set_observer",
]  # fmt: skip

_Placements: TypeAlias = tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class CommunicationCause:
    """Why the current communication runs.

    Attributes:
        step: the plan's step that moves an activation or a parameter; None for gradients.
        param: the parameter whose gradient is reduced; None for a bucket, and for activations.
        before: the placements of the tensor; () for a bucket.
        after: its placements afterwards.
    """

    step: SiteStep | None
    param: torch.Tensor | None
    before: _Placements
    after: _Placements


Observer: TypeAlias = Callable[[CommunicationCause], AbstractContextManager[None]]

_NO_OBSERVER = nullcontext()
# Read where a call of `moving` would cost too much; `set_observer` sets it.
observer: Observer | None = None
_preparing = False


def set_observer(new: Observer | None) -> None:
    """Sets the observer of this process; None removes it."""
    global observer
    observer = new


def moving(step: SiteStep, before: _Placements, after: _Placements) -> AbstractContextManager[None]:
    """Attributes communication within it to a step of the plan."""
    if observer is None:
        return _NO_OBSERVER
    return observer(CommunicationCause(step, None, before, after))


def reducing(
    param: torch.Tensor | None = None, before: _Placements = (), after: _Placements = ()
) -> AbstractContextManager[None]:
    """Attributes communication within it to the gradient of a parameter, or to a bucket."""
    if observer is None:
        return _NO_OBSERVER
    return observer(CommunicationCause(None, param, before, after))


@contextmanager
def preparing() -> Iterator[None]:
    """Marks communication that only a first call needs, such as of the sizes of shards."""
    global _preparing
    before, _preparing = _preparing, True
    try:
        yield
    finally:
        _preparing = before


def is_preparing() -> bool:
    """Whether communication is that of `preparing`."""
    return _preparing
