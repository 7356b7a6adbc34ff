"""Ports at which ranks join that are not started by `run_ranks`."""

import contextlib
import random
import socket


def free_port() -> int:
    """Returns a port of 127.0.0.1 that is free, and that no process gets which asks for any.

    The kernel gives those of ``net.ipv4.ip_local_port_range``, by default from 32,768 on; another
    process could get such a port before the ranks listen at it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
