"""A collective under way."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Handle"]


class Handle:
    """What a collective returns: with ``async_op=True`` its buffer is not to be used before `wait`.

    On a GPU waiting makes the current stream wait, not the host; so nothing raises here when a rank
    does not take part, and NCCL's watchdog ends the process. Handles of "exchange" are waited for
    in the same order on every rank: an all-reduce sends its second half then.
    """

    def __init__(self, finish: Callable[[], None], what: Callable[[], str] | None = None) -> None:
        self._finish: Callable[[], None] | None = finish
        self._what = what

    @property
    def done(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None

    def wait(self) -> None:
        """Waits for the collective, and does what is left of it; again, it does nothing."""
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _waits_for_(self) -> str:
        """The collective and the names of the buffer's tensors, for `fused_comm.diagnosis`."""
        return "DBuffer: a collective" if self._what is None else self._what()
