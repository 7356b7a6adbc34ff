"""Connects to torch's store on another host within a timeout.

torch's client has no timeout if a process listens and does not answer, such as a stopped process or
another service (c10d/TCPStore.cpp waits for the answer to its first message).
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
    """The store cannot be reached; the message is the reason."""


def connect(endpoint: Endpoint, timeout: float) -> dist.Store:
    """Returns a client of the store at ``endpoint``, waiting for it up to ``timeout``.

    Args:
        endpoint: address of the store.
        timeout: seconds.

    Raises:
        StoreUnreachableError: no process listens there, or it does not serve a store.
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
        raise StoreUnreachableError("a process listens there and does not answer") from None
    except dist.DistError as error:
        raise StoreUnreachableError(
            f"someone listens, and not as torch's store: {first_line(error)}"
        ) from error


def in_time(question: Callable[[], _Answer], timeout: float) -> _Answer:
    """Returns the result of ``question``, or raises its exception.

    Args:
        question: a query of a store; it is abandoned on a timeout.
        timeout: seconds.

    Raises:
        TimeoutError: there was no result in time.
    """
    return call_in_thread(question).result(timeout)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
