"""The pool of rank processes, which are started once, reused, and killed with their parent."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from testkit.ranks.forkserver import ForkServer, Process
from testkit.ranks.messages import DestroyGroup, RankCall, Ready, StartRank

START_TIMEOUT = 120.0  # seconds to import torch; several ranks share the cores
_TAIL = 8_000  # characters of a rank's output that are shown
_KILL_TIMEOUT = 5.0  # seconds for a killed process to end
_STACK_TIMEOUT = 1.0  # seconds for a hung rank to write its stack


@dataclass
class Rank:
    """One process of the pool.

    Attributes:
        index: its rank in every call.
        process: the process.
        connection: the socket to it.
        log: the file of its stdout and stderr since the call began.
        ready: whether it accepts a call; it does not while it starts, runs one, or destroys its
            process group.
    """

    index: int
    process: Process
    connection: Connection
    log: Path
    ready: bool = False

    def output(self) -> str:
        """Returns the end of its output since the call began."""
        text = self.log.read_text(errors="replace").rstrip()
        return text if len(text) <= _TAIL else f"...{text[-_TAIL:]}"

    def stack(self) -> str:
        """Returns its Python stack, innermost call first, or why there is none."""
        before = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_TIMEOUT
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.02)
            previous, text = text, self.log.read_bytes()[before:].decode(errors="replace")
            if text and text == previous:  # it has been written completely
                break
        os.truncate(self.log, before)
        return (
            text.rstrip()
            or "no Python stack within a second: the process is stopped, or not in Python code"
        )

    def ending(self) -> str:
        """Describes how its process ended."""
        code = self.process.poll()
        if code is None:
            return "closed its connection but still runs"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def kill(self) -> None:
        """Kills the process and closes the connection."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=_KILL_TIMEOUT)
        self.connection.close()


class Pool:
    """The rank processes of this process, and the store of their rendezvous.

    A call uses the first `world_size` of them; missing ones are started.

    Args:
        server: forks them.
        device: that their calls use.
    """

    def __init__(self, server: ForkServer, device: str = "cpu") -> None:
        self.ranks: list[Rank] = []
        self.device = device
        self._server = server
        self._calls = 0
        self._pid = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="testkit-"))
        # Port 0: the system chooses a free port and binds it at once.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        atexit.register(self.close)

    def usable(self) -> bool:
        """Whether this process made it (not its parent, by fork), and no idle rank was killed."""
        if self._pid != os.getpid():
            return False
        for rank in self.ranks:
            if not rank.ready and rank.connection.poll():
                rank.ready = receive(rank) == Ready()
        return all(rank.process.poll() is None for rank in self.ranks if rank.ready)

    def prepare(self, world_size: int) -> list[Rank]:
        """Starts missing processes and waits until the first `world_size` accept a call.

        Returns:
            the ranks that died or are not ready in time.

        Raises:
            OSError: rank `len(self.ranks)` cannot be started.
        """
        while len(self.ranks) < world_size:
            self.ranks.append(self._start(len(self.ranks)))
        deadline = time.monotonic() + START_TIMEOUT
        waiting = [rank for rank in self.ranks[:world_size] if not rank.ready]
        while waiting and (found := wait_for_ranks(waiting, deadline)):
            for rank in found:
                rank.ready = receive(rank) == Ready()
                if not rank.ready:
                    return [rank]
                waiting.remove(rank)
        return waiting

    def send(self, world_size: int, payload: bytes) -> None:
        """Sends a call to the first `world_size` ranks."""
        self._calls += 1
        call = RankCall(self._calls, world_size, tuple(sys.path), payload)
        for rank in self.ranks[:world_size]:
            rank.ready = False
            with contextlib.suppress(
                ConnectionError
            ):  # it died, which the wait for its reply reports
                rank.connection.send(call)

    def release(self, world_size: int) -> None:
        """Makes the ranks of a finished call destroy its process group."""
        for rank in self.ranks[:world_size]:
            with contextlib.suppress(ConnectionError):
                rank.connection.send(DestroyGroup())

    def close(self) -> None:
        """Kills every process and removes the logs; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        for rank in self.ranks:
            rank.kill()
        self.ranks.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, index: int) -> Rank:
        own_end, rank_end = socket.socketpair()
        connection = Connection(own_end.detach())
        log = self._folder / f"rank{index}.log"
        with rank_end, log.open("ab") as output, contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            process = self._server.fork(
                StartRank(index, self._store.port),
                output.fileno(),
                output.fileno(),
                rank_end.fileno(),
            )
            on_error.pop_all()
        return Rank(index, process, connection, log)


def wait_for_ranks(ranks: list[Rank], deadline: float) -> list[Rank]:
    """Waits for ranks that send a message or die; returns none if none does until the deadline.

    Processes are polled too, as a child that a rank forked may keep its socket open.
    """
    while True:
        remaining = deadline - time.monotonic()
        readable = wait([rank.connection for rank in ranks], timeout=min(max(remaining, 0.0), 0.25))
        ready = [
            rank for rank in ranks if rank.connection in readable or rank.process.poll() is not None
        ]
        if ready or remaining <= 0:
            return ready


def receive(rank: Rank) -> Any:
    """Returns the message of a rank, or None if it died."""
    try:
        if rank.connection.poll():
            return rank.connection.recv()
    except (EOFError, OSError):  # OSError: it died while it sent a message
        rank.process.wait(timeout=_KILL_TIMEOUT)  # its socket closes a little before it ends
    return None
