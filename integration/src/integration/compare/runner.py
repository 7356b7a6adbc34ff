"""Runs a job as a process of its own and watches it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil  # type: ignore[import-untyped]

from integration.compare.job import Job
from integration.metrics import StepRecord, read_metrics
from integration.train.stop import StopRequest

# Between two looks at a run's metrics.
POLL_SECONDS = 0.2
# What a run gets to end on SIGTERM before its processes are killed.
GRACE_SECONDS = 10.0
# What the system gets to end a killed process.
KILL_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: of its process; minus the signal's number where a signal ended it.
    """

    job: Job
    exit_code: int


class Watcher(Protocol):
    """Is told how the jobs are getting on."""

    def started(self, job: Job) -> None:
        """A job's process is about to start."""

    def progressed(self, job: Job, record: StepRecord) -> None:
        """A job has completed this step, and perhaps some before."""

    def ended(self, outcome: Outcome) -> None:
        """A job's process has ended."""


def run_jobs(jobs: Sequence[Job], watcher: Watcher, stop: StopRequest) -> list[Outcome]:
    """Run ``jobs`` one after another, those after a failed one too.

    Returns:
        An outcome for each; fewer when a stop was requested, which ends the present one.
    """
    outcomes: list[Outcome] = []
    for job in jobs:
        if stop.requested:
            break
        watcher.started(job)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "wb") as log, _process(job, log.fileno()) as process:
            seen = 0
            running = True
            while running and not stop.requested:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                running = process.poll() is None
                records = read_metrics(job.folder)
                if len(records) > seen:
                    watcher.progressed(job, records[-1])
                    seen = len(records)
        if not running:
            outcomes.append(Outcome(job, process.returncode))
            watcher.ended(outcomes[-1])
    return outcomes


@contextlib.contextmanager
def _process(job: Job, log: int) -> Iterator[subprocess.Popen[bytes]]:
    """The job's process for the length of the context; it has ended with all its ranks after."""
    command = [sys.executable, "-m", "integration.train", *job.arguments]
    # Its own session: a Ctrl-C at the terminal reaches it through us alone, once.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    # Ranks live in sessions of their own, so the group cannot be signalled as one.
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    if process.poll() is None:
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    psutil.wait_procs(ranks, timeout=KILL_SECONDS)
