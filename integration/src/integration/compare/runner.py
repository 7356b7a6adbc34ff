"""Runs jobs in separate processes and reports their progress."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]

from integration.compare.run import TrainingJob
from integration.train import session
from integration.train.metrics import SUMMARY_FILE, StepRecord, read_metrics
from integration.train.stop import StopRequest

# Interval at which a run's metrics are read.
POLL_SECONDS = 0.2
# Time between SIGTERM and SIGKILL.
GRACE_SECONDS = 10.0
# Time to wait for the end of killed processes.
KILL_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        exit_code: exit code of its process, negative for a signal; 0 for a job of a session whose
            process went on with the next job.
        log: log of its process; None: the job's own.
    """

    job: TrainingJob
    exit_code: int
    log: Path | None = None


class Watcher(Protocol):
    """Receives the progress of the jobs."""

    def started(self, job: TrainingJob) -> None:
        """Returns a job is about to start."""

    def progressed(self, job: TrainingJob, record: StepRecord) -> None:
        """Returns a job has completed this step, and perhaps some before."""

    def ended(self, outcome: Outcome) -> None:
        """Returns a job has ended."""


def run_jobs(jobs: Sequence[TrainingJob], watcher: Watcher, stop: StopRequest) -> list[Outcome]:
    """Runs ``jobs`` one after another, also after one has failed.

    The jobs of a session share processes and run when the first of them is due. If one fails, the
    remaining jobs of the session get new processes.

    Returns:
        An outcome for each job, in order; fewer if a stop was requested, which ends the current
        job.
    """
    outcomes: dict[TrainingJob, Outcome] = {}
    while (remaining := [job for job in jobs if job not in outcomes]) and not stop.requested:
        outcomes |= {each.job: each for each in _run(_first_session(remaining), watcher, stop)}
    return [outcomes[job] for job in jobs if job in outcomes]


def _first_session(jobs: Sequence[TrainingJob]) -> list[TrainingJob]:
    """Returns the first job, and the others of its session."""
    first = jobs[0]
    if first.session is None:
        return [first]
    return [job for job in jobs if job.session == first.session]


def _run(jobs: Sequence[TrainingJob], watcher: Watcher, stop: StopRequest) -> list[Outcome]:
    """Runs jobs in one process; returns the outcomes of those that ended."""
    log_path, ended, seen = jobs[0].log, list[Outcome](), 0
    log_path.parent.mkdir(parents=True, exist_ok=True)
    watcher.started(jobs[0])
    with log_path.open("wb") as log, _process(jobs, log.fileno()) as process:
        running = True
        while running and not stop.requested:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            running = process.poll() is None
            while len(ended) < len(jobs):
                job = jobs[len(ended)]
                records = read_metrics(job.folder)
                if len(records) > seen:
                    watcher.progressed(job, records[-1])
                    seen = len(records)
                # The last job ends with its process.
                if job is jobs[-1] or not (job.folder / SUMMARY_FILE).exists():
                    break
                ended.append(Outcome(job, 0, log_path))
                seen = 0
                watcher.ended(ended[-1])
                watcher.started(jobs[len(ended)])
    if not running:
        ended.append(Outcome(jobs[len(ended)], process.returncode, log_path))
        watcher.ended(ended[-1])
    return ended


def _command(jobs: Sequence[TrainingJob]) -> list[str]:
    if jobs[0].session is None:
        return ["integration.train", *jobs[0].arguments]
    path = jobs[0].log.with_suffix(".session.json")
    session.write_session(path, [job.arguments for job in jobs])
    return [session.MODULE, str(path)]


@contextlib.contextmanager
def _process(jobs: Sequence[TrainingJob], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process of the jobs; on exit it and its ranks have ended."""
    # A session of its own, so that Ctrl-C at the terminal does not reach it directly too.
    process = subprocess.Popen(
        [sys.executable, "-m", *_command(jobs)],
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
    # Each rank has its own session, so that there is no process group to signal.
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
