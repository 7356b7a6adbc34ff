"""A pdb that knows DTensors and ranks, and the terminal of its prompt."""

from __future__ import annotations

import io
import os
import pdb
import pprint
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO, Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api.inspect.collectives import collective_name
from plan_api.inspect.debug.rendezvous import Rendezvous
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement

__all__ = ["Debugger", "Terminal", "format_dtensor", "open_terminal"]


@dataclass(frozen=True)
class Terminal:
    """Input and output of a prompt; None: those of the process, with readline."""

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None


def open_terminal() -> Terminal:
    """Returns the standard input if it can be read from; otherwise the process's terminal.

    Processes of torchrun and multiprocessing often have no standard input, or /dev/null.

    Raises:
        RuntimeError: there is no terminal either.
    """
    stdin: IO[str] | None = sys.stdin
    if stdin is not None and not stdin.closed and not _is_null(stdin):
        is_own = stdin.isatty() and stdin is sys.__stdin__
        return Terminal() if is_own else Terminal(stdin, sys.stdout)
    try:
        return Terminal(
            open("/dev/tty", encoding="utf-8"),  # open for as long as the debugger
            open("/dev/tty", "w", encoding="utf-8"),
        )
    except OSError as error:
        raise RuntimeError(
            "breakpoint: expected a standard input or a terminal, got neither; start this process "
            "from a terminal, choose another rank, or set sys.stdin to a file of commands"
        ) from error


def _is_null(stream: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
    except (OSError, io.UnsupportedOperation):  # not a file of the system, such as StringIO
        return False


class Debugger(pdb.Pdb):
    """Opens prompts on this rank; the other ranks wait until the first one is left.

    Args:
        terminal: of the prompt.
        rendezvous: with the other ranks; None where this is the only process.
    """

    def __init__(self, terminal: Terminal, rendezvous: Rendezvous | None) -> None:
        # With SIGINT handled, Ctrl-C would open a prompt again, on this rank only.
        super().__init__(stdin=terminal.stdin, stdout=terminal.stdout, nosigint=True)
        self._rendezvous = rendezvous
        if rendezvous is not None:
            self.prompt = f"(rank {rendezvous.rank}) "

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Runs one prompt, until it is left."""
        rendezvous = self._rendezvous
        if rendezvous is not None and not rendezvous.ended:
            self.message(f"rank {rendezvous.rank} has stopped; others wait for it: see `ranks`")
        try:
            super().interaction(*args, **kwargs)
        finally:
            if rendezvous is not None and not rendezvous.ended:
                rendezvous.end(quits=self.quitting)

    def onecmd(self, line: str) -> bool:
        """Runs a command, and refuses collectives in it."""
        with nullcontext() if self._rendezvous is None else _no_collectives():
            return bool(super().onecmd(line))

    def do_p(self, arg: str) -> None:
        """Prints a value; of a DTensor, what is known of it on this rank."""
        self._print(arg, repr)

    def do_pp(self, arg: str) -> None:
        """Pretty-prints a value; of a DTensor, what is known of it on this rank."""
        self._print(arg, pprint.pformat)

    def do_full(self, arg: str) -> None:
        """Explains how to print a full tensor; without other ranks, prints it."""
        if self._rendezvous is None:
            self._print(f"({arg}).full_tensor()", repr)
            return
        self.error(
            f"the full tensor of {arg} needs all ranks, which wait for this one: a collective "
            f"would hang. Put full = {arg}.full_tensor() in front of breakpoint(), for all ranks, "
            f"and p full"
        )

    def do_ranks(self, arg: str) -> None:
        """Prints where each rank is."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            self.message("this is the only process")
            return
        for rank in range(rendezvous.size):
            where = "is here" if rank == rendezvous.rank else rendezvous.describe_rank(rank)
            if rendezvous.ended and rank != rendezvous.rank:
                where = "has gone on"
            self.message(f"rank {rank} {where}")

    def _print(self, arg: str, format_value: Callable[[Any], str]) -> None:
        try:
            value = self._getval(arg)
        except Exception:
            return  # _getval has printed the error
        try:
            text = format_dtensor(value) if isinstance(value, DTensor) else format_value(value)
            self.message(text)
        except Exception as error:
            self.error(f"{type(error).__name__}: {error}")


def _no_collectives() -> TorchDispatchMode:
    return _RefuseCollectives()  # type: ignore[no-untyped-call]


class _RefuseCollectives(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor dispatches the collectives, which are checked
        name = collective_name(func)
        if name:
            raise RuntimeError(
                f"breakpoint: this runs a collective ({name}), and the other ranks wait for this "
                f"one: it would hang; run it in front of breakpoint(), on all ranks"
            )
        return func(*args, **(kwargs or {}))


def format_dtensor(tensor: DTensor) -> str:
    """Describes what this rank knows of a DTensor, without communication.

    Returns:
        a line on the global tensor, one on its placements, then the local tensor.
    """
    mesh, local = tensor.device_mesh, tensor._local_tensor
    names, dtype = axis_names(mesh), str(tensor.dtype).removeprefix("torch.")
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    placements = ", ".join(
        f"{name}={format_placement(placement)}"
        for name, placement in zip(names, tensor.placements, strict=True)
    )
    coordinate = mesh.get_coordinate()
    here = "not on this rank"
    if coordinate is not None:
        here = ", ".join(f"{name}={number}" for name, number in zip(names, coordinate, strict=True))
    lines = [
        f"DTensor {tuple(tensor.shape)} {dtype} on {local.device.type}, mesh {sizes}",
        f"placements {placements}",
        f"local {tuple(local.shape)} at {here}:",
        str(local.detach()),
    ]
    if tensor.grad_fn is not None:
        lines.append(f"made by {tensor.grad_fn.name()}")
    if tensor.is_leaf and tensor.grad is not None:
        lines.append("has a gradient: see .grad")
    return "\n".join(lines)
