"""A client of torch's store at another host, in time or with a reason.

torch's own client keeps no time-out where someone listens and does not answer: a stopped process,
or a service of another kind (c10d/TCPStore.cpp: its first word waits for the answer).
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fused_comm.diagnosis.store_channel import call_in_thread
from integration.train.addresses import Endpoint, wait_for_listener

_LEAST_SECONDS = 1.0
_Answer = TypeVar("_Answer")


class StoreUnreachableError(Exception):
    """There is no store; as text, why."""


def connect(endpoint: Endpoint, timeout: float) -> dist.Store:
    """Returns a client of the store that someone holds at ``endpoint``, or will within ``timeout``.

    Args:
        endpoint: where.
        timeout: in seconds.

    Raises:
        StoreUnreachableError: nobody listens there, or no store does.
    """
    deadline = time.monotonic() + timeout
    if (why_not := wait_for_listener(endpoint, timeout)) is not None:
        raise StoreUnreachableError(why_not)

    def client() -> dist.Store:
        patience = timedelta(seconds=timeout)
        return dist.TCPStore(endpoint.name, endpoint.port, wait_for_workers=False, timeout=patience)

    try:
        return in_time(client, max(_LEAST_SECONDS, deadline - time.monotonic()))
    except TimeoutError:
        raise StoreUnreachableError("someone listens and does not answer") from None
    except dist.DistError as error:
        raise StoreUnreachableError(
            f"someone listens, and not as torch's store: {first_line(error)}"
        ) from error


def in_time(question: Callable[[], _Answer], timeout: float) -> _Answer:
    """Returns what ``question`` returns, or raise what it raises.

    Args:
        question: of a store; it is left to itself when time is over.
        timeout: in seconds.

    Raises:
        TimeoutError: time is over.
    """
    return call_in_thread(question).result(timeout)


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
