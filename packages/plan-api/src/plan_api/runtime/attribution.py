"""On whose behalf communication runs: a seam through which `track` learns it.

Movers and gradients say it only where they are about to move something, so a hook that moves
nothing pays nothing; while nobody watches, saying it is one look at a global.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.fuse import Step

__all__ = ["Cause", "moving", "reducing", "set_watcher"]

_Placements: TypeAlias = tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class Cause:
    """Why what runs now runs.

    Attributes:
        step: of the plan, which moves an activation; None for gradients.
        param: whose gradient is reduced; None for those of many together, and for activations.
        before: how the tensor is placed; () where there are many.
        after: how it will be.
    """

    step: Step | None
    param: torch.Tensor | None
    before: _Placements
    after: _Placements


Watcher: TypeAlias = Callable[[Cause], AbstractContextManager[None]]

_NOBODY = nullcontext()
_watcher: Watcher | None = None


def set_watcher(watcher: Watcher | None) -> None:
    """Makes this the one that is told; None: nobody is."""
    global _watcher
    _watcher = watcher


def moving(step: Step, before: _Placements, after: _Placements) -> AbstractContextManager[None]:
    """Within it a tensor is moved as a step of the plan says."""
    return _NOBODY if _watcher is None else _watcher(Cause(step, None, before, after))


def reducing(
    param: torch.Tensor | None = None, before: _Placements = (), after: _Placements = ()
) -> AbstractContextManager[None]:
    """Within it the gradient of a parameter is reduced, or those of many."""
    return _NOBODY if _watcher is None else _watcher(Cause(None, param, before, after))
