"""What a long command shows: progress bars while it runs, then its result as one line or as JSON.

Progress goes to stderr, so that stdout has the result only: a sentence, or with ``--json`` one
document that other programs read, beside which the sentence goes to stderr.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class LiveDisplay:
    """Shows progress bars within a ``with`` block; a disabled ``Progress`` shows nothing."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def __enter__(self) -> Self:
        """Starts drawing."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops drawing."""
        self._bars.stop()


class ProgressBar(LiveDisplay):
    """Shows one bar while stderr is a terminal; it is removed at the end of the ``with`` block."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file stays there
        )
        self._task = bars.add_task("", total=None)
        super().__init__(bars)

    def show(self, doing: str, done: int, total: int) -> None:
        """Shows what is being done, and how many of ``total`` parts are done."""
        self._bars.update(self._task, description=doing, completed=done, total=total)

    def begin(self, doing: str, number: int, total: int) -> None:
        """Shows that part ``number`` of ``total``, counted from 1, begins; in logs as a line."""
        self.show(doing, number - 1, total)
        if self._bars.disable:
            self._console.print(f"{number}/{total}: {doing}", markup=False)


def print_result(sentence: str, document: Mapping[str, Any] | list[Any], *, as_json: bool) -> None:
    """Prints the result of a command.

    Args:
        sentence: the result in one line, for stdout; with JSON for stderr.
        document: the result for programs.
        as_json: whether stdout gets the document, as with ``--json``.
    """
    if as_json:
        print(to_json(document))
    print(sentence, file=sys.stderr if as_json else sys.stdout, flush=True)


def to_json(document: Any) -> str:
    """Returns a document as JSON; numbers that are not finite become "nan", "inf" and "-inf"."""
    return json.dumps(_jsonable(document), indent=2, allow_nan=False)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
