"""Progress bars in the terminal for the length of a ``with`` block."""

from types import TracebackType
from typing import Self

from rich.progress import Progress


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
