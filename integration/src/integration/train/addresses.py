"""Finds the address and the network interface by which other hosts reach this one."""

import os
import socket
import time
from contextlib import closing
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from integration.errors import UsageError

# Read by gloo. Without it gloo listens at the address of the host name, which on many distributions
# is the loopback interface.
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
RETRY_SECONDS = 0.2


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
            time.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    return why
