"""pdb that knows DTensors and ranks."""

from __future__ import annotations

import pdb
import pprint
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api.inspect.debug.meeting import Meeting
from plan_api.inspect.debug.shown import shown
from plan_api.inspect.debug.terminal import Terminal
from plan_api.inspect.track.collective import name_of

__all__ = ["Debugger"]


class Debugger(pdb.Pdb):
    """At its first prompt the other ranks wait.

    Args:
        terminal: of the prompt.
        meeting: the stop; None where this is the only process.
    """

    def __init__(self, terminal: Terminal, meeting: Meeting | None) -> None:
        # Ctrl-C would open a prompt again, on this rank alone.
        super().__init__(stdin=terminal.stdin, stdout=terminal.stdout, nosigint=True)
        self._meeting = meeting
        if meeting is not None:
            self.prompt = f"(rank {meeting.rank}) "

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """One prompt, until it is left."""
        meeting = self._meeting
        if meeting is not None and not meeting.ended:
            self.message(f"rank {meeting.rank} has stopped; others wait for it: see `ranks`")
        try:
            super().interaction(*args, **kwargs)
        finally:
            if meeting is not None and not meeting.ended:
                meeting.end(quits=self.quitting)

    def onecmd(self, line: str) -> bool:
        """Runs a command, without communication."""
        with nullcontext() if self._meeting is None else _no_collectives():
            return bool(super().onecmd(line))

    def do_p(self, arg: str) -> None:
        """Prints a value; of a DTensor, what is known of it on this rank."""
        self._show(arg, repr)

    def do_pp(self, arg: str) -> None:
        """Prints a value in lines; of a DTensor, what is known of it on this rank."""
        self._show(arg, pprint.pformat)

    def do_full(self, arg: str) -> None:
        """Explains why the whole of a DTensor is not to be had here."""
        if self._meeting is None:
            self._show(f"({arg}).full_tensor()", repr)
            return
        self.error(
            f"the whole of {arg} is on all ranks, which wait for this one: a collective would hang."
            f" Put full = {arg}.full_tensor() in front of breakpoint(), for all ranks, and p full"
        )

    def do_ranks(self, arg: str) -> None:
        """Shows where each rank is."""
        meeting = self._meeting
        if meeting is None:
            self.message("this is the only process")
            return
        for rank in range(meeting.size):
            where = "is here" if rank == meeting.rank else meeting.where(rank)
            if meeting.ended and rank != meeting.rank:
                where = "has gone on"
            self.message(f"rank {rank} {where}")

    def _show(self, arg: str, show: Callable[[Any], str]) -> None:
        try:
            value = self._getval(arg)
        except Exception:
            return  # it has told what is wrong
        try:
            self.message(shown(value) if isinstance(value, DTensor) else show(value))
        except Exception as error:
            self.error(f"{type(error).__name__}: {error}")


def _no_collectives() -> TorchDispatchMode:
    return _NoCollectives()  # type: ignore[no-untyped-call]


class _NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it makes of it what is looked at
        name = name_of(func)
        if name:
            raise RuntimeError(
                f"breakpoint: this makes a collective ({name}), and the other ranks wait for this "
                f"one: it would hang; make it in front of breakpoint(), on all ranks"
            )
        return func(*args, **(kwargs or {}))
