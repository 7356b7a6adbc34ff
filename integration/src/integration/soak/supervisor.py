"""Injects faults into a run and records their effects."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from integration.soak.fault_schedule import SIGNALS, Fault
from integration.soak.torchrun import Torchrun

_POLL_SECONDS = 0.02
# Python ignores an exception that is raised in a destructor: the signal is then sent again.
_AGAIN_SECONDS = 5.0
# torchrun gives a rank 30 s to end before it kills it; then the ranks import torch.
_RESTART_SECONDS = 180.0


class FaultError(Exception):
    """A run did not recover from a fault; the message names the fault and the missing event."""


@dataclass(frozen=True)
class Incident:
    """A fault and its effects; times are seconds since its signal was sent.

    Attributes:
        fault: the planned fault.
        at_step: completed steps when the signal was sent.
        noticed: time until it was detected.
        noticed_by: what detected it: the watchdog of a rank, or torchrun.
        restarted: time until all ranks were new processes.
        checkpoint: name of the checkpoint that the run resumed from.
        from_step: step of that checkpoint.
        went_on: time until the first step after it.
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
    progress: Callable[[int], None],
) -> list[Incident]:
    """Injects each fault after its step and waits for the recovery, then for the end of the run.

    Args:
        run: the running torchrun.
        fault_schedule: faults in the order of their steps.
        timeout: timeout of the watchdog, in seconds.
        say: called with each incident.
        progress: called again and again with the number of completed steps.

    Raises:
        FaultError: a fault was not detected in time, or the run did not recover or failed.
    """
    incidents = []
    for fault in fault_schedule:
        incident = _FaultObserver(run, timeout, progress).of(fault)
        say(incident)
        incidents.append(incident)

    def has_ended() -> bool:
        progress(run.step())
        return run.exit_code() is not None

    _wait(run, has_ended, "end", seconds=None)
    return incidents


class _FaultObserver:
    """Injects one fault and observes its effects."""

    def __init__(self, run: Torchrun, timeout: float, progress: Callable[[int], None]) -> None:
        self._run = run
        self._timeout = timeout
        self._progress = progress

    def of(self, fault: Fault) -> Incident:
        run = self._run

        def has_come() -> bool:
            self._progress(step := run.step())
            return step >= fault.step

        _wait(run, has_come, f"come to step {fault.step}", seconds=None)
        _wait(run, lambda: len(run.workers()) == run.ranks, "show its ranks", seconds=None)
        before, reports, resumes = run.workers(), run.reports(), len(run.resumes())
        at_step = run.step()
        started = time.monotonic()

        def waited(condition: Callable[[], bool], what: str, seconds: float) -> float:
            _wait(run, condition, f"{what} after {fault}", seconds=seconds)
            return time.monotonic() - started

        signalled = _SignalledRank(before[fault.rank], fault.kind)
        noticed_by: list[str] = []

        def is_noticed() -> bool:
            signalled.resend()
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

    def resend(self) -> None:
        """Sends the signal again if the rank should have raised and still runs."""
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
