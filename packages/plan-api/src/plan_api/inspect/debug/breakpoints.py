"""Stops one rank at a prompt, while the other ranks wait.

The waiting ranks poll the store. So no collective is pending, whose timeout would end the session,
on any backend. Nor is a blocking wait of the store: it has a timeout as well, cannot be
interrupted, and blocks the connection for others, such as NCCL's heartbeat.
"""

from __future__ import annotations

import itertools
import sys
import time
from bdb import BdbQuit
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from plan_api.inspect.debug.debugger import Debugger, open_terminal
from plan_api.inspect.debug.rendezvous import Rendezvous

__all__ = ["breakpoint"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between polls
_numbers = itertools.count()  # the same on all ranks, which stop equally often


def breakpoint(rank: int = 0) -> None:  # noqa: A001  # as the builtin, and torch.distributed's
    """Opens pdb where it is called, on one rank; the others wait there until the prompt is left.

    All ranks have to call it. They continue when the prompt is left, by ``c``, ``n``, ``s``, ``r``
    or ``unt``: after a step of this rank the others are ahead, and wait for it in their next
    collective, with its timeout. ``q`` ends all ranks. Without a process group, or with a fake one,
    it is pdb.

    At the prompt ``p x`` and ``pp x`` of a DTensor print its placements, its shape, and this rank's
    local tensor; ``ranks`` prints where each rank waits. What needs the other ranks is refused, as
    it would hang: ``full x``, and every expression that runs a collective.

    Args:
        rank: the global rank that stops.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: on the rank that stops, if it has neither a standard input nor a terminal; the
            others end as after ``q``.
        bdb.BdbQuit: on all ranks, after ``q``.
    """
    frame = sys._getframe(1)
    rendezvous = _join_rendezvous(rank)
    if rendezvous is not None and rendezvous.rank != rank:
        _wait(rendezvous, frame)
        return
    try:
        debugger = Debugger(open_terminal(), rendezvous)
    except BaseException:
        if rendezvous is not None:
            rendezvous.end(quits=True)
        raise
    debugger.set_trace(frame)  # has to be the last statement: pdb would stop at the next one


def _join_rendezvous(rank: int) -> Rendezvous | None:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    size = dist.get_world_size()
    if not 0 <= rank < size:
        raise ValueError(f"breakpoint: rank={rank} must be from 0 to {size - 1}")
    name = f"plan_api/breakpoint/{next(_numbers)}"
    store = dist.PrefixStore(name, _get_default_store())
    return Rendezvous(store, dist.get_rank(), size, rank)


def _wait(rendezvous: Rendezvous, frame: FrameType) -> None:
    rendezvous.arrive(frame)
    pause = _FIRST_PAUSE
    while not rendezvous.ended:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    if rendezvous.quits:
        raise BdbQuit(
            f"rank {rendezvous.stopped} has quit the debugger, so rank {rendezvous.rank} ends"
        )
