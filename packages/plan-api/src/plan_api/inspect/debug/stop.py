"""Stops one rank at a prompt, and holds the others.

They ask the store again and again whether to go on. So no collective is under way, whose time-out
would end the session, on no backend; and none of the store's own: a blocking wait has one as well,
cannot be interrupted, and keeps the connection from others, such as NCCL's heartbeat.
"""

from __future__ import annotations

import itertools
import sys
import time
from bdb import BdbQuit
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from plan_api.inspect.debug.debugger import Debugger
from plan_api.inspect.debug.meeting import Meeting
from plan_api.inspect.debug.terminal import terminal

__all__ = ["breakpoint"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between questions
_numbers = itertools.count()  # all ranks stop equally often, as with collectives


def breakpoint(rank: int = 0) -> None:  # noqa: A001  # as the builtin, and torch.distributed's
    """Opens pdb where it is called, on one rank; the others wait there for as long as it takes.

    All ranks have to call it. They go on when the prompt is left, by ``c``, ``n``, ``s``, ``r`` or
    ``unt``: after a step of this rank, they are ahead, and wait for it in their next collective,
    with its time-out. ``q`` ends all ranks. Without a process group, or with a fake one, it is pdb.

    At the prompt ``p x`` and ``pp x`` of a DTensor show its placements, its shape, and this rank's
    part of it; ``ranks`` shows who waits where. What would need the other ranks is refused, as it
    would hang: ``full x``, and every expression that makes a collective.

    Args:
        rank: of all; where to stop.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: the rank that is to stop has neither a standard input nor a terminal; raised
            there, and the others end as after ``q``.
        bdb.BdbQuit: on all ranks, after ``q``.
    """
    frame = sys._getframe(1)
    meeting = _meeting(rank)
    if meeting is not None and meeting.rank != rank:
        _wait(meeting, frame)
        return
    try:
        debugger = Debugger(terminal(), meeting)
    except BaseException:
        if meeting is not None:
            meeting.end(quits=True)
        raise
    debugger.set_trace(frame)  # nothing may come after it: pdb would stop there


def _meeting(rank: int) -> Meeting | None:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    size = dist.get_world_size()
    if not 0 <= rank < size:
        raise ValueError(f"breakpoint: rank={rank} must be from 0 to {size - 1}")
    name = f"plan_api/breakpoint/{next(_numbers)}"
    store = dist.PrefixStore(name, _get_default_store())
    return Meeting(store, dist.get_rank(), size, rank)


def _wait(meeting: Meeting, frame: FrameType) -> None:
    meeting.arrive(frame)
    pause = _FIRST_PAUSE
    while not meeting.ended:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    if meeting.quits:
        raise BdbQuit(f"rank {meeting.stopped} has quit the debugger, so rank {meeting.rank} ends")
