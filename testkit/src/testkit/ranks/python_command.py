"""Python commands, as ``python -m MODULE``, in processes that begin with torch imported.

An interpreter that imports torch, DTensor and transformers takes seconds of processor time before
it does what a test asks for. A command that the fork server runs is a process too, with its own
arguments, environment, working directory, output, signals and exit code, and starts in a hundredth
of a second, with the modules of `preload`.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import torch

from testkit.ranks.forkserver import Process, shared_server


@dataclass(frozen=True)
class PythonCommand:
    """To the fork server: run this command.

    Attributes:
        arguments: those of ``python``: ``-m MODULE``, ``-c CODE`` or a file, then the program's.
        folder: its working directory.
        environment: all of its environment.
    """

    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]

    def run(self) -> None:
        """Runs the command in this process, a new fork of the server; returns when it has ended."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        _seed_as_a_new_process()
        first, *rest = self.arguments
        if first == "-m":
            sys.argv = list(rest)
            sys.path.insert(0, self.folder)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = list(self.arguments)
            sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name="__main__")


def _seed_as_a_new_process() -> None:
    """Seeds what a new interpreter seeds from the system, as forks begin with equal states."""
    random.seed()
    torch.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


class PythonProcess:
    """A command that runs; made by `start_python`.

    Attributes:
        pid: its process id.
    """

    def __init__(
        self, arguments: Sequence[str], process: Process, stdout: IO[str], stderr: IO[str]
    ) -> None:
        self.pid = process.pid
        self._arguments = list(arguments)
        self._process, self._stdout, self._stderr = process, stdout, stderr

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Waits for its end.

        Args:
            timeout: seconds; a command that still runs then is killed.

        Returns:
            its exit code, negative for a signal, and its output.

        Raises:
            subprocess.TimeoutExpired: it was killed; the exception has its output.
        """
        code = self._process.wait(timeout)
        if code is None:
            self.send_signal(signal.SIGKILL)
            self._process.wait(timeout=5.0)
        output, errors = map(_written, (self._stdout, self._stderr))
        if code is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout, output, errors)
        return subprocess.CompletedProcess(self._arguments, code, output, errors)


def _written(file: IO[str]) -> str:
    with file:
        file.seek(0)  # the command has moved the position, which the two processes share
        return file.read()


def start_python(
    *arguments: str, environment: Mapping[str, str] | None = None, preloaded: bool = True
) -> PythonProcess:
    """Starts ``python ARGUMENTS`` as a fork of a process that has imported torch.

    The differences from a new interpreter: modules that torch and `preload` have imported are not
    imported again, so that what they read of the environment and print then is not the command's;
    the module search path is that of the tests; torch has one thread until
    `torch.set_num_threads`; and the process is a child of the fork server, which it dies with.
    Tests of these, and of the processes that a command starts, need a new interpreter.

    Args:
        *arguments: ``-m MODULE``, ``-c CODE`` or a file, then the arguments of the program. Options
            of the interpreter itself are not known.
        environment: all of the command's environment; by default that of this process.
        preloaded: whether the modules of `preload` are imported; otherwise torch's alone are.

    Returns:
        the process, with this one's working directory, in a session of its own, without input.

    Raises:
        ValueError: the arguments begin with another option of the interpreter, or are missing.
        OSError: the process that forks cannot be started, or has ended.
    """
    unknown = not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"))
    if unknown or len(arguments) < 1 + arguments[0].startswith("-"):
        raise ValueError(
            f"start_python: expected -m MODULE, -c CODE or a file, got {arguments}; for other "
            "options of the interpreter start sys.executable"
        )
    variables = os.environ if environment is None else environment
    command = PythonCommand(arguments, os.getcwd(), dict(variables))
    with contextlib.ExitStack() as on_error:
        stdout, stderr = (
            on_error.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2)
        )
        server = shared_server(preloaded=preloaded)
        process = server.fork(command, stdout.fileno(), stderr.fileno())
        on_error.pop_all()
    return PythonProcess(arguments, process, stdout, stderr)


def run_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    preloaded: bool = True,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS`` to its end, as `start_python` starts it.

    Args:
        *arguments: those of `start_python`.
        environment: that of `start_python`.
        preloaded: that of `start_python`.
        timeout: seconds after which the command is killed.

    Returns:
        its exit code, negative for a signal, and its output.

    Raises:
        subprocess.TimeoutExpired: it was killed; the exception has its output.
        ValueError: those of `start_python`.
        OSError: those of `start_python`.
    """
    process = start_python(*arguments, environment=environment, preloaded=preloaded)
    return process.wait(timeout)
