"""The events of a recorded step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["CallEvent", "CollectiveEvent", "OperatorEvent", "StepPhase"]


class StepPhase(Enum):
    """The part of a step; recomputation of activations is part of backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class OperatorEvent:
    """One operator, as DTensor sees it: below autograd, above DTensor's operators on local tensors.

    Attributes:
        name: as in ``aten.addmm``.
        site: path of the innermost module that was called, "" for the model; in backward the module
            whose forward created the autograd node; None outside of the model (loss, optimizer,
            buckets of gradients), and where it is unknown.
        phase: of the step.
        before: how its tensors are placed, a placement per axis: ``S(0),R R,S(1)``; a tensor that
            is not a DTensor is ``local``, and a list of them is counted: ``3x R,R``.
        after: the same of its results.
        bytes: of its results on this rank.
        start: microseconds on the host since the record began.
        duration: on the host, recording included; a GPU may run it later.
    """

    name: str
    site: str | None
    phase: StepPhase
    before: str
    after: str
    bytes: int
    start: float
    duration: float


@dataclass(frozen=True)
class CollectiveEvent:
    """One call that reached a process group.

    Attributes:
        name: as in ``all_gather``, the same for all overloads.
        site: path of the innermost module that was called, "" for the model; in backward the module
            whose forward created the autograd node; None outside of the model (loss, optimizer,
            buckets of gradients), and where it is unknown.
        phase: of the step.
        axis: of the mesh, by name; of several that form one group ``dp+tp``; "" for another group.
        ranks: of the group; None where torch does not say.
        before: how the tensor is placed that a hook or the reduction of gradients redistributes,
            along all axes; "" where it is not known.
        after: how it is placed after all collectives of this redistribution.
        bytes: the larger of its input and its output on this rank.
        cause: ``plan``, ``redistribute`` for a call of `plan_api.redistribute`, ``gradient of
            NAME``, ``gradients``, ``aten.mul`` for an operator that redistributes its arguments, or
            "".
        line: of the plan, for the cause ``plan``; several are ", "-separated. Of the call, for the
            cause ``redistribute``.
        start: microseconds on the host since the record began.
        duration: until its result was waited for, or the backend reported its end, whichever is
            known; on a GPU that is what the host saw.
    """

    name: str
    site: str | None
    phase: StepPhase
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
class CallEvent:
    """One call of a module, its hooks included.

    Attributes:
        site: its path.
        phase: of the step.
        start: microseconds on the host since the record began.
        duration: on the host.
    """

    site: str
    phase: StepPhase
    start: float
    duration: float
