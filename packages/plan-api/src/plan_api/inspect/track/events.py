"""What a record holds.

Note: a *site* is the path of the innermost module that was called, "" for the model itself. In
backward it is the module whose forward made the autograd node that runs. None: outside of the
model, as its loss and the optimizer are, or unknown, as of a node made before the record began.
Times are microseconds of the host since the record began.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Call", "Collective", "Operator", "Phase"]


class Phase(Enum):
    """Which part of a step it is. What checkpointing computes again counts as backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Operator:
    """One operator, as DTensor sees it: below autograd, above what it does with local tensors.

    Attributes:
        name: as in ``aten.addmm``.
        site: see above.
        phase: of the step.
        before: how its tensors are placed, a placement per axis: ``S(0),R R,S(1)``; a tensor that
            is no DTensor is ``local``, and a list of them is counted: ``3x R,R``.
        after: the same of its results.
        bytes: of its results on this rank.
        start: see above.
        duration: of the host, with what recording costs; a GPU may be at it later.
    """

    name: str
    site: str | None
    phase: Phase
    before: str
    after: str
    bytes: int
    start: float
    duration: float


@dataclass(frozen=True)
class Collective:
    """One call that reached a process group.

    Attributes:
        name: as in ``all_gather``, the same for all overloads.
        site: see above.
        phase: of the step.
        axis: of the mesh, by name; several that are one group: ``dp+tp``; "" for another group.
        ranks: of the group; None where torch does not tell.
        before: how the tensor was placed that a hook or the reduction of gradients moves, all axes
            together; "" where it is not known.
        after: how it will be, when all collectives of this move are done.
        bytes: the larger of its input and its output on this rank.
        cause: ``plan``, ``gradient of NAME``, ``gradients``, ``aten.mul`` for an operator that
            moves what it is given, or "".
        line: of the plan, for the cause ``plan``; several are ", "-separated.
        start: see above.
        duration: until somebody has waited for its result, or the backend has said that it is
            done, whichever is known; on a GPU that is what the host saw.
    """

    name: str
    site: str | None
    phase: Phase
    axis: str
    ranks: int | None
    before: str
    after: str
    bytes: int
    cause: str
    line: str
    start: float
    duration: float


@dataclass(frozen=True)
class Call:
    """One call of a module, its hooks included.

    Attributes:
        site: its path.
        phase: of the step.
        start: see above.
        duration: of the host.
    """

    site: str
    phase: Phase
    start: float
    duration: float
