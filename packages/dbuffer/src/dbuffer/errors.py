"""Names collectives on all ranks, and makes the error for a rank that does not take part.

Note: a rank that skips a module starts another collective than its neighbours. Buffers of equal
size would be mixed up silently. So "exchange" tags its sends with a hash of the buffer's name:
sends of different buffers are never matched, and both ranks end in the time-out of the process
group. The backend's collectives are matched by order alone; `CHECK` finds the mismatch there, and
at once with either strategy.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import Axis
from ragged_shard.planner import Layout

__all__ = ["CHECK", "checks", "collective_errors", "compare", "names_of", "tag_of"]

#: Environment variable: "1" has ranks compare names before each collective, and wait for that.
CHECK = "DBUFFER_CHECK"

_SHOWN = 4


def names_of(layout: Layout) -> str:
    """Formats the names of a layout's first tensors, and the number of others."""
    shown = ", ".join(repr(spec.name) for spec in layout.specs[:_SHOWN])
    more = len(layout.specs) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def tag_of(name: str, shard_size: int, dtype: torch.dtype) -> int:
    """Returns a hash of 29 bits, the same on all ranks; `Exchange` adds 2 of a tag's 31 bits."""
    return zlib.crc32(f"{name}, {shard_size}, {dtype}".encode()) >> 3


class collective_errors:  # noqa: N801  # it reads as a function, as contextlib's do
    """Names the collective in the backend's errors that a block raises.

    A class, and not `contextlib.contextmanager`, because every collective enters one.

    Args:
        what: returns the collective and the buffer, for the error.
        axis: of the collective.

    Raises:
        RuntimeError: of the backend's type, from its time-out, or from a connection that a rank
            closed when it died.
    """

    __slots__ = ("_axis", "_what")

    def __init__(self, what: Callable[[], str], axis: Axis) -> None:
        self._what, self._axis = what, axis

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        """Raises the error with more words; those of memory stay as they are."""
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise _failure(self._what(), self._axis, error) from error


def _failure(what: str, axis: Axis, error: RuntimeError) -> RuntimeError:
    kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
    given = str(error).strip().partition("\n")[0]
    failed = (
        f"{what} over axis {axis.name} of ranks {_ranks(axis)} failed on rank "
        f"{axis.ranks[axis.position]}: {given}\n"
    )
    if given.startswith("No backend type associated with device type"):
        return kind(
            f"{failed}Call init_process_group without backend, or with one for each device, as in "
            f"'cpu:gloo,cuda:nccl'; or make the buffer on a device that the group's backend has."
        )
    return kind(
        f"{failed}Another rank died (see what it printed first), or does not take part: all ranks "
        f"have to run the same modules, and start the same collectives, in the same order; "
        f"{CHECK}=1 in the environment says where they part. For one that is only slow, raise "
        f"init_process_group(timeout=)."
    )


def checks() -> bool:
    """Whether ranks are to compare names before each collective."""
    value = os.environ.get(CHECK, "0")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"DBuffer: expected {CHECK} in the environment to be 0 or 1, got {value!r}"
        )
    return value == "1"


def compare(what: str, axis: Axis, device: str) -> None:
    """Waits for all ranks of an axis, and compares what each is about to do.

    Raises:
        RuntimeError: on every rank, with what each does.
    """
    own = torch.tensor(zlib.crc32(what.encode()), dtype=torch.int64, device=device)
    extremes = torch.stack([own, -own])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=axis.group)
    if extremes[0].item() == -extremes[1].item():
        return
    others: list[Any] = [None] * axis.size
    dist.all_gather_object(others, (dist.get_rank(), what), group=axis.group)
    starts = "; ".join(f"rank {rank} starts {one}" for rank, one in sorted(others))
    raise RuntimeError(f"expected all ranks to start the same collective, got: {starts}")


def _ranks(axis: Axis) -> str:
    if axis.size <= 8:
        return str(list(axis.ranks))
    return f"[{axis.ranks[0]}, ..., {axis.ranks[-1]}] ({axis.size})"
