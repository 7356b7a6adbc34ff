"""A process that imports torch once and forks ranks: `ForkServer` starts it, `serve` runs there.

`multiprocessing.forkserver` is not used: it runs the caller's script again in each process, and its
processes outlive a caller that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Fork:
    """To the server, with the file descriptors of a rank's connection and log: start this rank."""

    rank: int
    store_port: int


@dataclass(frozen=True)
class Forked:
    """From the server: the rank runs as this process."""

    pid: int


@dataclass(frozen=True)
class Ended:
    """From the server: a rank's process has ended; a negative exit code is a signal's."""

    pid: int
    exit_code: int


class ForkServer:
    """Starts the process; `fork` has it make a rank. It ends with its caller, and its ranks too.

    Ranks have the environment of the moment at which the server is started.

    Args:
        modules: that it imports after torch, so that ranks begin with them.

    Raises:
        OSError: the process cannot be created.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        arguments = (server_end.fileno(), os.getpid(), *modules)
        self._owner = os.getpid()
        self._socket = own_end
        self._exit_codes: dict[int, int] = {}
        with server_end, contextlib.ExitStack() as on_error:
            on_error.callback(own_end.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "testkit.ranks.worker", *map(str, arguments)],
                env=environment,
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # only the caller handles Ctrl-C
            )
            on_error.pop_all()
        atexit.register(self.close)

    def usable(self) -> bool:
        """Whether this process started it (not its parent, by fork), and it runs."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(
        self, rank: int, store_port: int, connection: int, log: int, timeout: float
    ) -> Process:
        """Starts a rank.

        Args:
            rank: its number.
            store_port: of the caller's TCPStore, on the loopback device.
            connection: the file descriptor of the rank's end of its connection.
            log: the file descriptor of its stdout and stderr.
            timeout: seconds that the server may take, of which it needs some to import torch.

        Returns:
            the rank's process.

        Raises:
            OSError: the server has ended, or does not answer in time.
        """
        message = pickle.dumps(Fork(rank, store_port))
        with contextlib.suppress(ConnectionError):  # it has ended, which the answer reports
            socket.send_fds(self._socket, [message], [connection, log])
        deadline = time.monotonic() + timeout
        while (answer := self._receive(deadline)) is not None:
            if isinstance(answer, Forked):
                return Process(self, answer.pid)
        raise TimeoutError(f"the process that forks ranks did not answer within {timeout:g} s")

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a rank's process, negative for a signal; None while it runs."""
        try:
            while pid not in self._exit_codes and self._receive(time.monotonic()) is not None:
                pass
        except OSError:  # the server has ended, and by its end the kernel killed the ranks
            return self._exit_codes.get(pid, -signal.SIGKILL)
        return self._exit_codes.get(pid)

    def close(self) -> None:
        """Kills the server and its ranks; does nothing in a forked child."""
        if self._owner == os.getpid():
            atexit.unregister(self.close)
            self._process.kill()
            self._process.wait()
            self._socket.close()

    def _receive(self, deadline: float) -> Forked | Ended | None:
        """The next message, of which `Ended` is noted; None if there is none by the deadline."""
        if not wait([self._socket], timeout=max(deadline - time.monotonic(), 0.0)):
            return None
        message = b""
        with contextlib.suppress(ConnectionError):  # it ended without having read a request
            message = self._socket.recv(_MESSAGE_BYTES)
        if not message:
            code = self._process.wait()
            raise ConnectionError(f"the process that forks ranks ended with exit code {code}")
        answer: Forked | Ended = pickle.loads(message)
        if isinstance(answer, Ended):
            self._exit_codes[answer.pid] = answer.exit_code
        return answer


@dataclass(frozen=True)
class Process:
    """A rank's process, a child of the server.

    Attributes:
        server: forked it, and learns of its end.
        pid: its process id.
    """

    server: ForkServer
    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.server.exit_code(self.pid)

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """Waits for its end; its exit code, or None if it still runs."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return code


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, which is `parent` now."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call of prctl
        os._exit(1)


def serve(requests: socket.socket, run_rank: Callable[[int, int, int, int], Any]) -> None:
    """Forks ranks until the caller closes the socket; a forked process runs its rank and returns.

    Args:
        requests: the socket to the caller.
        run_rank: is called in a forked process with the file descriptor of its connection, the
            process id of this server, its rank, and the port of the caller's TCPStore.
    """
    gc.freeze()  # the collections of ranks skip imported objects, and do not copy their pages
    server = os.getpid()
    wakeup, on_signal = socket.socketpair()
    on_signal.setblocking(False)
    signal.set_wakeup_fd(on_signal.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # its byte arrives at `wakeup`
    while True:
        ready = wait([requests, wakeup])
        if wakeup in ready:
            wakeup.recv(_MESSAGE_BYTES)
            for ended in _reaped():
                requests.send(pickle.dumps(ended))
        if requests in ready:
            message, (*descriptors,), _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
            if not message:
                return
            request: Fork = pickle.loads(message)
            connection, log = descriptors
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (requests, wakeup, on_signal):
                    end.close()
                os.setsid()
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
                run_rank(connection, server, request.rank, request.store_port)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(pickle.dumps(Forked(pid)))


def _reaped() -> list[Ended]:
    """The children that have ended since the last call."""
    ended: list[Ended] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there are no children
            return ended
        if pid == 0:
            return ended
        ended.append(Ended(pid, os.waitstatus_to_exitcode(status)))
