"""Shows the progress of the jobs: a bar per job in a terminal, lines of text elsewhere."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from integration.compare.result import Failure
from integration.compare.run import TrainingJob
from integration.compare.runner import Outcome
from integration.report.command_output import LiveDisplay
from integration.train.metrics import StepRecord


class JobsDisplay(LiveDisplay):
    """Shows the progress of the jobs; implements ``runner.Watcher``.

    Args:
        jobs: every job, in the order of execution.
        console: output; a console that is not a terminal gets a line per event.
    """

    def __init__(self, jobs: Sequence[TrainingJob], console: Console) -> None:
        self._console = console
        self._started_at = 0.0
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            job.name: bars.add_task(job.name, total=job.steps, start=False, state="waiting")
            for job in jobs
        }
        super().__init__(bars)

    def started(self, job: TrainingJob) -> None:
        """Shows that a job's process is starting."""
        self._started_at = time.monotonic()
        ranks = "1 rank" if job.ranks == 1 else f"{job.ranks} ranks"
        self._state(job, f"starting {ranks}")
        self._line(f"{job.name}: {ranks}, {job.steps} steps")

    def progressed(self, job: TrainingJob, record: StepRecord) -> None:
        """Shows a completed step."""
        task = self._tasks[job.name]
        self._bars.start_task(task)
        self._bars.update(task, completed=record.step)
        speed = record.tokens / record.seconds
        self._state(job, f"loss {record.loss:.4f}  {speed:,.0f} tokens/s")

    def ended(self, outcome: Outcome) -> None:
        """Shows that a job's process has ended."""
        seconds = time.monotonic() - self._started_at
        how = "done" if outcome.exit_code == 0 else "failed"
        self._state(outcome.job, f"{how} in {seconds:.0f} s")
        self._line(f"{outcome.job.name}: {how} in {seconds:.0f} s")

    def failed(self, failure: Failure) -> None:
        """Shows why a job has no result, and the end of its log."""
        self._console.print(
            Text(f"\n{failure.name} {failure.reason}; its log is {failure.log}", "red")
        )
        self._console.print(Text(failure.tail, "dim"))

    def _state(self, job: TrainingJob, state: str) -> None:
        self._bars.update(self._tasks[job.name], state=state)

    def _line(self, sentence: str) -> None:
        if self._bars.disable:
            self._console.print(sentence, markup=False)
