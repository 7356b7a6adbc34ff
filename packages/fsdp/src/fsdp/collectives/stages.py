"""The stages of a group's collectives, which a listener can follow; `fsdp.simulate` has one.

Tensors that are allocated within a stage belong to the collective: unsharded parameters, gradients
that are reduced. A listener so learns what memory is for, when a collective is issued, and when it
is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from typing import Protocol

__all__ = ["GroupStage", "StageListener", "group_stage", "listen_to_stages"]


class GroupStage(Enum):
    """A stage of a group's all-gather or reduction.

    Attributes:
        ALL_GATHER: memory of the unsharded parameters is allocated, and their all-gather issued.
        ALL_GATHER_WAIT: the all-gather is waited for.
        RESHARD: unsharded parameters are freed, or copied to a post-forward shard before.
        COPY_IN: gradients are copied into the buffer of the reduction.
        REDUCE_SCATTER: the reduce-scatter is issued.
        REDUCE_SCATTER_WAIT: it is waited for, and replicas are reduced.
        GATHER_GRADS: the reduced gradients are gathered, where they are replicated.
        ASSIGN_GRADS: the sharded gradients are allocated and assigned.
    """

    ALL_GATHER = auto()
    ALL_GATHER_WAIT = auto()
    RESHARD = auto()
    COPY_IN = auto()
    REDUCE_SCATTER = auto()
    REDUCE_SCATTER_WAIT = auto()
    GATHER_GRADS = auto()
    ASSIGN_GRADS = auto()


class StageListener(Protocol):
    """Is called when a stage begins and ends; stages may be nested.

    The collective is the `GroupAllGather` or `GroupReduceScatter`, always the same of a group.
    """

    def begin_stage(self, stage: GroupStage, collective: object) -> None:
        """Is called before anything of a stage is done."""
        ...

    def end_stage(self, stage: GroupStage, collective: object) -> None:
        """Is called after a stage, unless it raised."""
        ...


_listener: StageListener | None = None
_NO_STAGE = nullcontext()


@contextmanager
def listen_to_stages(listener: StageListener) -> Iterator[None]:
    """Makes a listener follow the stages of all groups of this process, within the context."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def group_stage(stage: GroupStage, collective: object) -> AbstractContextManager[None]:
    """Returns a context that is a stage of a collective; without a listener it does nothing."""
    return _NO_STAGE if _listener is None else _notified_stage(_listener, stage, collective)


@contextmanager
def _notified_stage(
    listener: StageListener, stage: GroupStage, collective: object
) -> Iterator[None]:
    listener.begin_stage(stage, collective)
    yield
    listener.end_stage(stage, collective)
