"""A process that imports torch once and forks others: `ForkServer` starts it, `serve` runs there.

Forked are ranks (`testkit.ranks.pool`) and Python commands (`testkit.ranks.python_command`).

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MESSAGE_BYTES = 2**17  # a command has its environment; the kernel allows 1.6 times as much
_START_TIMEOUT = 120.0  # seconds to import torch and to fork

_preloaded: dict[str, None] = {}  # names of modules, in order
_server: ForkServer | None = None  # outlives the pools, which a failed call closes


@dataclass(frozen=True)
class Forked:
    """From the server: what was requested runs as this process."""

    pid: int


@dataclass(frozen=True)
class Ended:
    """From the server: a forked process has ended; a negative exit code is a signal's."""

    pid: int
    exit_code: int


class ForkServer:
    """Starts the process; `fork` has it fork itself. With its caller it ends, and its forks too.

    Forks have the environment of the moment at which the server is started.

    Args:
        modules: that it imports after torch, so that forks begin with them.

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

    def fork(self, request: object, stdout: int, stderr: int, *descriptors: int) -> Process:
        """Starts a process.

        Args:
            request: what it runs, of a type that `testkit.ranks.worker` knows.
            stdout: the file descriptor of its stdout.
            stderr: the file descriptor of its stderr.
            *descriptors: other file descriptors that it has.

        Returns:
            the process.

        Raises:
            OSError: the server has ended, or does not answer in time.
        """
        message = pickle.dumps(request)
        with contextlib.suppress(ConnectionError):  # it has ended, which the answer reports
            socket.send_fds(self._socket, [message], [stdout, stderr, *descriptors])
        deadline = time.monotonic() + _START_TIMEOUT
        while (answer := self._receive(deadline)) is not None:
            if isinstance(answer, Forked):
                return Process(self, answer.pid)
        raise TimeoutError(f"the process that forks ranks did not answer in {_START_TIMEOUT:g} s")

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a forked process, negative for a signal; None while it runs."""
        try:
            while pid not in self._exit_codes and self._receive(time.monotonic()) is not None:
                pass
        except OSError:  # the server has ended, and by its end the kernel killed the forks
            return self._exit_codes.get(pid, -signal.SIGKILL)
        return self._exit_codes.get(pid)

    def close(self) -> None:
        """Kills the server and its forks; does nothing in a forked child."""
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
    """A forked process, a child of the server.

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


def preload(*modules: str) -> None:
    """Makes ranks begin with these modules imported, once for all of them, as they do with torch.

    So do the commands of `run_python`. Called from a ``conftest.py``, before the first `run_ranks`,
    it saves each rank the import. A module whose import changes torch changes it for all ranks.

    Args:
        *modules: full names, in the order in which they are imported.

    Raises:
        RuntimeError: ranks were started before.
    """
    new = [name for name in modules if name not in _preloaded]
    if new and _server is not None:
        raise RuntimeError(
            f"preload: expected a call before the first run_ranks, got {', '.join(new)} after it; "
            "call it in conftest.py"
        )
    _preloaded.update(dict.fromkeys(new))


def preloaded() -> tuple[str, ...]:
    """Returns the names of the modules that `preload` was called with."""
    return tuple(_preloaded)


def shared_server() -> ForkServer:
    """Returns the server of this process; starts one if there is none, or it has ended.

    Raises:
        OSError: the process cannot be created.
    """
    global _server
    if _server is None or not _server.usable():
        if _server is not None:
            _server.close()
        _server = ForkServer(_preloaded)
    return _server


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, which is `parent` now."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call of prctl
        os._exit(1)


def serve(requests: socket.socket, run: Callable[[Any, Sequence[int]], None]) -> None:
    """Forks until the caller closes the socket; a forked process runs its request and returns.

    Args:
        requests: the socket to the caller.
        run: is called in a forked process, which dies with this one, with the request and the file
            descriptors that came with it, without those of stdout and stderr.
    """
    gc.freeze()  # the collections of forks skip imported objects, and do not copy their pages
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
            message, (*descriptors,), _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
            if not message:
                return
            request = pickle.loads(message)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (requests, wakeup, on_signal):
                    end.close()
                os.setsid()
                die_with_parent(server)
                for number, descriptor in enumerate(descriptors[:2], start=1):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                run(request, descriptors[2:])
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
