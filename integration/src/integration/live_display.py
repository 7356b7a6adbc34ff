"""A drawing in the terminal that lasts as long as a ``with`` block."""

from types import TracebackType
from typing import Self

from rich.progress import Progress


class LiveDisplay:
    """Draws its bars while the block runs; a disabled ``Progress`` draws nothing."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self._bars.stop()
