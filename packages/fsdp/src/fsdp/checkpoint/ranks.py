"""Agreement of ranks: an error of one rank is raised by all of them, so that none waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks, in their order; pickled, so small objects only."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def rank_of(process_group: dist.ProcessGroup | None) -> int:
    """Returns this rank's index in the group; 0 without processes."""
    return dist.get_rank(process_group) if dist.is_initialized() else 0


def global_rank(rank: int, process_group: dist.ProcessGroup | None) -> int:
    """Returns the rank in the default group, as meshes have it, of an index in the group."""
    return rank if process_group is None else dist.get_global_rank(process_group, rank)


@contextmanager
def raised_on_all_ranks(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Runs a block on every rank; where it raises on one, all ranks raise.

    A rank whose block raised raises its own error, others that of the first rank that raised.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    # Errors of Python's own classes can be pickled, which those of others may not survive.
    is_sent = own is None or type(own).__module__ == "builtins"
    sent = own if is_sent else RuntimeError(repr(own))
    errors = [error for error in gather(sent, process_group) if error is not None]
    if own is not None:
        raise own
    if errors:
        raise errors[0]
