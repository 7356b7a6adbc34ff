"""Runs jobs as processes of their own and watches them."""

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

from integration.compare.training_job import TrainingJob
from integration.metrics import SUMMARY_FILE, StepRecord, read_metrics
from integration.train import session
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
        exit_code: of its process, if that ended with it; minus the signal's number where a signal
            ended it.
        log: what its process wrote; None: the job's own.
    """

    job: TrainingJob
    exit_code: int
    log: Path | None = None


class Watcher(Protocol):
    """Is told how the jobs are getting on."""

    def started(self, job: TrainingJob) -> None:
        """A job is about to start."""

    def progressed(self, job: TrainingJob, record: StepRecord) -> None:
        """A job has completed this step, and perhaps some before."""

    def ended(self, outcome: Outcome) -> None:
        """A job has ended."""


def run_jobs(jobs: Sequence[TrainingJob], watcher: Watcher, stop: StopRequest) -> list[Outcome]:
    """Run ``jobs`` one after another, those after a failed one too.

    Jobs of one session share processes, and run where the first of them stands, until one fails:
    what is left of them gets new ones.

    Returns:
        An outcome for each, in their order; fewer when a stop was requested, which ends the present
        one.
    """
    outcomes: dict[TrainingJob, Outcome] = {}
    while (left := [job for job in jobs if job not in outcomes]) and not stop.requested:
        outcomes |= {each.job: each for each in _run(_together(left), watcher, stop)}
    return [outcomes[job] for job in jobs if job in outcomes]


def _together(jobs: Sequence[TrainingJob]) -> list[TrainingJob]:
    """The first job, and those that share its processes."""
    first = jobs[0]
    if first.session is None:
        return [first]
    return [job for job in jobs if job.session == first.session]


def _run(jobs: Sequence[TrainingJob], watcher: Watcher, stop: StopRequest) -> list[Outcome]:
    """Run jobs in one process; return the outcomes of those that came to an end."""
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
                # The last one has ended when its process has.
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
    """The jobs' process for the length of the context; it has ended with all its ranks after."""
    # Its own session: a Ctrl-C at the terminal reaches it through us alone, once.
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
