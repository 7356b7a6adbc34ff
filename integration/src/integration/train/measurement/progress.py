"""Shows the progress of a run: a bar in a terminal, lines of text elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from integration.report.command_output import LiveDisplay
from integration.train.metrics import StepRecord


class ProgressDisplay(LiveDisplay):
    """Shows the steps of one run, on the first rank.

    Args:
        enabled: whether this rank shows them.
        total: number of steps of the run.
        done: number of steps completed before a resume.
    """

    def __init__(self, *, enabled: bool, total: int, done: int) -> None:
        self._console = Console(stderr=True, quiet=not enabled, highlight=False, soft_wrap=True)
        self._total = total
        bars = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = bars.add_task("", total=total, completed=done, loss="-", speed="-")
        super().__init__(bars)

    def say(self, sentence: str) -> None:
        """Prints a sentence."""
        self._console.print(sentence, markup=False)

    def show(self, record: StepRecord) -> None:
        """Shows a completed step."""
        if record.eval_loss is not None:
            self.say(f"step {record.step}/{self._total}  {_evaluation(record)}")
        speed = f"{record.tokens / record.seconds:,.0f} tokens/s"
        if record.mfu is not None:
            speed += f"  MFU {record.mfu:.1%}"
        if not self._bars.disable:
            self._bars.update(
                self._task, completed=record.step, loss=f"{record.loss:.4f}", speed=speed
            )
        elif record.step in (1, self._total) or record.step % 10 == 0:
            self.say(f"step {record.step}/{self._total}  loss {record.loss:.4f}  {speed}")


def _evaluation(record: StepRecord) -> str:
    perplexity = record.eval_perplexity
    end = "" if perplexity is None else f"  perplexity {perplexity:.2f}"
    return f"evaluation loss {record.eval_loss:.4f}{end}"
