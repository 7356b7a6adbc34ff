"""How ranks meet that no agent has brought together: at the first rank's address, or with a reason.

Under torchrun the agents have met already and hold the store. Elsewhere (the environment of a
PyTorchJob, ``--hosts``) the first rank holds it, and every rank signs in: so that when time is over
each can say who has not.
"""

import os
import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from integration.errors import UsageError
from integration.train.addresses import RETRY_SECONDS, Endpoint
from integration.train.store_client import StoreUnreachableError, connect, first_line, in_time

# For what is asked last, when time is over.
_LAST_ANSWER_SECONDS = 5.0
_WAYS = "MASTER_ADDR and MASTER_PORT, or --rendezvous,"


def rendezvous_endpoint() -> Endpoint:
    """Returns where the environment says that ranks meet.

    Raises:
        UsageError: it does not say, or not where.
    """
    try:
        return Endpoint.parse(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    except KeyError as error:
        raise UsageError(
            f"RANK is set and {error.args[0]} is not; set RANK, WORLD_SIZE, MASTER_ADDR and"
            " MASTER_PORT, or start the ranks by --ranks or torchrun"
        ) from None


def join_ranks(rank: int, size: int, timeout: float) -> dist.Store:
    """Returns the store of ``size`` ranks after all of them have signed in.

    Args:
        rank: of this process; 0 holds the store, at MASTER_ADDR:MASTER_PORT.
        size: number of ranks.
        timeout: seconds to wait for the others.

    Raises:
        UsageError: not all came, or there is nobody at the address.
    """
    endpoint = rendezvous_endpoint()
    store = _hold(endpoint, size, timeout) if rank == 0 else _reach(endpoint, rank, size, timeout)
    try:
        missing = in_time(
            lambda: _sign_in(store, rank, size, timeout), timeout + _LAST_ANSWER_SECONDS
        )
    except (dist.DistError, TimeoutError) as error:
        raise UsageError(
            f"rank 0 of {size} ended or stood still while rank {rank} waited for others at"
            f" {endpoint}; see what it says"
        ) from error
    if missing:
        raise UsageError(
            f"{ranks(missing)} of {size} did not come to {endpoint} within {timeout:g} s; start"
            f" them, with the same {_WAYS} and number of ranks"
        )
    return store


def _sign_in(store: dist.Store, rank: int, size: int, timeout: float) -> list[int]:
    """Waits for all ranks; returns those that have not come when time is over."""
    deadline = time.monotonic() + timeout
    names = [f"signed-in/{each}" for each in range(size)]
    store.set(names[rank], "")
    while not store.check(names):  # store.wait would log on every time-out
        if time.monotonic() > deadline:
            return [each for each, name in enumerate(names) if not store.check([name])]
        time.sleep(RETRY_SECONDS)
    return []


def _hold(endpoint: Endpoint, size: int, timeout: float) -> dist.Store:
    try:
        # Nobody else may be there to connect to yet: who holds a store connects to it over the
        # loopback interface, and whether others can is seen by whether they come.
        return dist.TCPStore(
            "localhost",
            endpoint.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except dist.DistError as error:
        raise UsageError(
            f"rank 0 of {size} cannot use port {endpoint.port} for the rendezvous:"
            f" {first_line(error)}; give another port, on all hosts"
        ) from error


def _reach(endpoint: Endpoint, rank: int, size: int, timeout: float) -> dist.Store:
    try:
        return connect(endpoint, timeout)
    except StoreUnreachableError as why:
        raise UsageError(
            f"rank {rank} of {size} met nobody at {endpoint} within {timeout:g} s ({why});"
            f" start rank 0 there, or mend {_WAYS} which must name its host"
        ) from why


def ranks(numbers: Iterable[int]) -> str:
    """Returns ``rank 3`` or ``ranks 1, 3``."""
    listed = sorted(numbers)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
