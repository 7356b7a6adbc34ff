"""Joins ranks that no torchrun agent has joined, and names the missing ones on a timeout.

Under torchrun the agents have a common store. Otherwise (the environment of a PyTorchJob,
``--hosts``) rank 0 serves the store, and every rank registers in it, so that on a timeout each rank
can name the missing ones.
"""

import os
import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from integration.errors import UsageError
from integration.train.addresses import RETRY_SECONDS, Endpoint
from integration.train.store_client import StoreUnreachableError, connect, first_line, in_time

# Time for the last query of the store, after the timeout.
_LAST_QUERY_SECONDS = 5.0
_SOURCES = "MASTER_ADDR and MASTER_PORT, or --rendezvous,"


def rendezvous_endpoint() -> Endpoint:
    """Returns the endpoint of the rendezvous from the environment.

    Raises:
        UsageError: a variable is missing or invalid.
    """
    try:
        return Endpoint.parse(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    except KeyError as error:
        raise UsageError(
            f"expected {error.args[0]} in the environment, as RANK is set, got none; set RANK,"
            " WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start the ranks by --ranks or torchrun"
        ) from None


def join_ranks(rank: int, size: int, timeout: float) -> dist.Store:
    """Returns the common store after all ranks have registered in it.

    Args:
        rank: rank of this process; rank 0 serves the store, at MASTER_ADDR:MASTER_PORT.
        size: number of ranks.
        timeout: seconds to wait for the others.

    Raises:
        UsageError: not all ranks registered, or the store is unreachable.
    """
    endpoint = rendezvous_endpoint()
    store = (
        _serve(endpoint, size, timeout) if rank == 0 else _connect(endpoint, rank, size, timeout)
    )
    try:
        missing = in_time(
            lambda: _register(store, rank, size, timeout), timeout + _LAST_QUERY_SECONDS
        )
    except (dist.DistError, TimeoutError) as error:
        raise UsageError(
            f"rank 0 of {size} ended or hung while rank {rank} waited for others at {endpoint};"
            " see its output"
        ) from error
    if missing:
        raise UsageError(
            f"{ranks(missing)} of {size} did not join {endpoint} within {timeout:g} s; start"
            f" them, with the same {_SOURCES} and number of ranks"
        )
    return store


def _register(store: dist.Store, rank: int, size: int, timeout: float) -> list[int]:
    """Registers this rank and waits for all; returns the missing ranks on a timeout."""
    deadline = time.monotonic() + timeout
    names = [f"registered/{each}" for each in range(size)]
    store.set(names[rank], "")
    while not store.check(names):  # store.wait logs every timeout
        if time.monotonic() > deadline:
            return [each for each, name in enumerate(names) if not store.check([name])]
        time.sleep(RETRY_SECONDS)
    return []


def _serve(endpoint: Endpoint, size: int, timeout: float) -> dist.Store:
    try:
        # Rank 0 connects to its store over the loopback interface; that others can reach it is
        # shown by their registration.
        return dist.TCPStore(
            "localhost",
            endpoint.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except dist.DistError as error:
        raise UsageError(
            f"rank 0 of {size} cannot listen at port {endpoint.port} of the rendezvous:"
            f" {first_line(error)}; give another port, on all hosts"
        ) from error


def _connect(endpoint: Endpoint, rank: int, size: int, timeout: float) -> dist.Store:
    try:
        return connect(endpoint, timeout)
    except StoreUnreachableError as why:
        raise UsageError(
            f"rank {rank} of {size} could not join rank 0 at {endpoint} within {timeout:g} s"
            f" ({why}); start rank 0 there, or correct {_SOURCES} which must name its host"
        ) from why


def ranks(numbers: Iterable[int]) -> str:
    """Returns ``rank 3`` or ``ranks 1, 3``."""
    listed = sorted(numbers)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
