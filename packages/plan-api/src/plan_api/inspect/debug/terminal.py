"""Where a prompt can be read from."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from typing import IO

__all__ = ["Terminal", "terminal"]


@dataclass(frozen=True)
class Terminal:
    """Input and output of a prompt; None: those of the process, with readline."""

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None


def terminal() -> Terminal:
    """The standard input if anything can come from it; else the terminal of the process.

    What torchrun and multiprocessing start has often none, or /dev/null for it.

    Raises:
        RuntimeError: there is no terminal either.
    """
    stdin: IO[str] | None = sys.stdin
    if stdin is not None and not stdin.closed and not _is_null(stdin):
        own = stdin.isatty() and stdin is sys.__stdin__
        return Terminal() if own else Terminal(stdin, sys.stdout)
    try:
        return Terminal(
            open("/dev/tty", encoding="utf-8"),  # the debugger's, while it lives
            open("/dev/tty", "w", encoding="utf-8"),
        )
    except OSError as error:
        raise RuntimeError(
            "breakpoint: this process has neither a standard input nor a terminal: start it from "
            "one, choose another rank, or set sys.stdin to a file of commands"
        ) from error


def _is_null(stream: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    except (OSError, io.UnsupportedOperation):  # no file of the system's, as StringIO
        return False
