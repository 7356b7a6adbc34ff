"""The rendezvous's endpoint, and the address and interface by which this host reaches it."""

import os
import socket
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

from fused_comm.diagnosis.store_channel import call_in_thread
from integration.errors import UsageError

# Read by gloo. Without it gloo listens at the address of the host name, which on many distributions
# is the loopback interface.
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_RETRY_SECONDS = 0.2
_LEAST_SECONDS = 1.0


class StoreUnreachableError(Exception):
    """The store cannot be reached; the message is the reason."""


@dataclass(frozen=True)
class Endpoint:
    """A name or IPv4 address with a port."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Parses ``NAME:PORT``.

        Raises:
            UsageError: the text has another form.
        """
        name, _, port = text.rpartition(":")
        if not name or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UsageError(
                f"rendezvous: expected NAME:PORT, got {text!r}; give a name or address of the first"
                " host and a free port of it, as in node0:29500"
            )
        return cls(name, int(port))

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


def endpoint_of_environment() -> Endpoint:
    """Returns MASTER_ADDR and MASTER_PORT, which torchrun sets.

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


def address_towards(endpoint: Endpoint) -> str | None:
    """Returns this host's address on the route to ``endpoint``; None if there is no route or name.

    Nothing is sent: connecting a datagram socket only selects the route.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((endpoint.name, endpoint.port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_local_address(name: str) -> bool:
    """Returns whether a name or address is this host's; the kernel binds to no other."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            return False
    return True


def choose_interface(endpoint: Endpoint) -> None:
    """Selects gloo's interface by the route to ``endpoint``, unless the environment names one."""
    address = address_towards(endpoint)
    for name, addresses in psutil.net_if_addrs().items():
        if address is not None and address in (each.address for each in addresses):
            os.environ.setdefault(INTERFACE_VARIABLE, name)


def wait_for_listener(endpoint: Endpoint, timeout: float) -> str | None:
    """Waits until a process listens at ``endpoint``.

    Args:
        endpoint: the address.
        timeout: seconds.

    Returns:
        None, or the reason of the last failure when the time is over.
    """
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((endpoint.name, endpoint.port), timeout=remaining).close()
            return None
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    return why


def answers(endpoint: Endpoint, timeout: float) -> bool:
    """Returns whether a process on the endpoint's host accepts or refuses a connection."""
    try:
        socket.create_connection((endpoint.name, endpoint.port), timeout=timeout).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def connect(endpoint: Endpoint, timeout: float) -> dist.Store:
    """Returns a client of the store at ``endpoint``, waiting for it up to ``timeout``.

    torch's client has no timeout if a process listens and does not answer, such as a stopped
    process or another service (c10d/TCPStore.cpp waits for the answer to its first message).

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
        return call_in_thread(client).result(max(_LEAST_SECONDS, deadline - time.monotonic()))
    except TimeoutError:
        raise StoreUnreachableError("a process listens there and does not answer") from None
    except dist.DistError as error:
        raise StoreUnreachableError(
            f"someone listens, and not as torch's store: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
