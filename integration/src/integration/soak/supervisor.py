"""Disturbs a run, and notes what comes of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from integration.soak.fault_schedule import SIGNALS, Fault
from integration.soak.torchrun import Torchrun

_POLL_SECONDS = 0.02
# Python drops an exception that comes up in a destructor: a rank that does not raise is told again.
_AGAIN_SECONDS = 5.0
# torchrun gives a rank 30 s to end before it kills it; then the ranks import torch.
_RESTART_SECONDS = 180.0


class FaultError(Exception):
    """A run did not get over a fault; the message says which and how far it came."""


@dataclass(frozen=True)
class Incident:
    """A fault and what came of it; times are seconds since its signal was sent.

    Attributes:
        fault: as planned.
        at_step: completed when the signal was sent.
        noticed: until somebody knew of it.
        noticed_by: whose report says so: the watchdog's of a rank, or torchrun.
        restarted: until all ranks were new processes.
        checkpoint: the name of what they went on from.
        from_step: its step.
        went_on: until the first step behind it.
    """

    fault: Fault
    at_step: int
    noticed: float
    noticed_by: str
    restarted: float
    checkpoint: str
    from_step: int
    went_on: float


def disturb(
    run: Torchrun,
    fault_schedule: Sequence[Fault],
    *,
    timeout: float,
    say: Callable[[Incident], None],
) -> list[Incident]:
    """Send each fault behind its step, and wait until the run is over it; then for its end.

    Args:
        run: under way.
        fault_schedule: in the order of their steps.
        timeout: of the watchdog, in seconds.
        say: is given each incident.

    Raises:
        FaultError: a fault was not noticed in time or not got over, or the run ended wrongly.
    """
    incidents = []
    for fault in fault_schedule:
        incident = _FaultObserver(run, timeout).of(fault)
        say(incident)
        incidents.append(incident)
    _wait(run, lambda: run.exit_code() is not None, "end", seconds=None)
    return incidents


class _FaultObserver:
    """Follows one fault."""

    def __init__(self, run: Torchrun, timeout: float) -> None:
        self._run = run
        self._timeout = timeout

    def of(self, fault: Fault) -> Incident:
        run = self._run
        _wait(run, lambda: run.step() >= fault.step, f"come to step {fault.step}", seconds=None)
        _wait(run, lambda: len(run.workers()) == run.ranks, "show its ranks", seconds=None)
        before, reports, resumes = run.workers(), run.reports(), len(run.resumes())
        at_step = run.step()
        started = time.monotonic()

        def waited(condition: Callable[[], bool], what: str, seconds: float) -> float:
            _wait(run, condition, f"{what} after {fault}", seconds=seconds)
            return time.monotonic() - started

        told = _SignalledRank(before[fault.rank], fault.kind)
        noticed_by: list[str] = []

        def is_noticed() -> bool:
            told.again()
            grown = {rank for rank, size in run.reports().items() if size > reports.get(rank, 0)}
            noticed_by.extend(f"watchdog of rank {rank}" for rank in sorted(grown))
            if not noticed_by and any(not psutil.pid_exists(one.pid) for one in before.values()):
                noticed_by.append("torchrun")
            return bool(noticed_by)

        def has_new_workers() -> bool:
            workers = run.workers()
            old = {process.pid for process in before.values()}
            return len(workers) == run.ranks and old.isdisjoint(one.pid for one in workers.values())

        noticed = waited(is_noticed, "notice it", self._timeout + _AGAIN_SECONDS)
        restarted = waited(has_new_workers, "restart", _RESTART_SECONDS)
        waited(lambda: len(run.resumes()) > resumes, "resume", _RESTART_SECONDS)
        path, from_step = run.resumes()[-1]
        went_on = waited(lambda: run.step() > from_step, "go on", _RESTART_SECONDS)
        return Incident(
            fault, at_step, noticed, noticed_by[0], restarted, Path(path).name, from_step, went_on
        )


class _SignalledRank:
    """A rank that was sent the signal of a fault."""

    def __init__(self, process: psutil.Process, kind: str) -> None:
        self._process, self._kind = process, kind
        self._send()

    def again(self) -> None:
        """Send it once more where a rank should have raised and lives on."""
        late = time.monotonic() - self._sent > _AGAIN_SECONDS
        if late and self._kind == "raise" and self._process.is_running():
            self._send()

    def _send(self) -> None:
        self._process.send_signal(SIGNALS[self._kind])
        self._sent = time.monotonic()


def _wait(
    run: Torchrun, condition: Callable[[], bool], what: str, *, seconds: float | None
) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    while not condition():
        if (code := run.exit_code()) is not None:
            if condition():
                return
            raise FaultError(
                f"torchrun ended with exit code {code} and did not {what}; see {run.log}"
            )
        if deadline is not None and time.monotonic() > deadline:
            raise FaultError(f"the run did not {what} within {seconds:g} s; see {run.log}")
        time.sleep(_POLL_SECONDS)
