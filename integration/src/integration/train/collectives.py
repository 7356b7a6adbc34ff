"""Counts the collectives and products of one step, beside torch's dispatcher and not in it.

A dispatch mode would send DTensors another way than the one that trains; testkit's `CommLog` reads
torch's execution trace instead. Taking and reading the trace costs the counted step time, and no
other: it should be one whose time nobody looks at.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from integration.metrics import CollectiveCount
from integration.train.memory import peak_rss_bytes, reset_peak_rss
from testkit import CommLog


class CollectiveCounter:
    """Counts what this rank issues and computes in one step.

    Args:
        step: of which number, counted from 1; None: of none.
    """

    def __init__(self, step: int | None) -> None:
        self._step = step
        self._logs: list[CommLog] = []
        self._peak = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Encloses a part of the step of this number; a step may have several."""
        if number != self._step:
            yield
            return
        # Reading a trace takes memory too, which is not the run's.
        self._peak = self.peak_rss_bytes
        with CommLog() as log:
            yield
        self._logs.append(log)
        reset_peak_rss()

    @property
    def peak_rss_bytes(self) -> int:
        """The peak resident memory of this process without that of counting."""
        return max(self._peak, peak_rss_bytes())

    @property
    def product_flops(self) -> int | None:
        """FLOPs of this rank's matrix products and attention; None where no step was counted."""
        return sum(log.product_flops for log in self._logs) if self._logs else None

    @property
    def counts(self) -> list[CollectiveCount] | None:
        """Of every kind that there was, in the order of first use; None where no step was counted.

        Barriers, which carry nothing, are left out.
        """
        if not self._logs:
            return None
        issued = [call for log in self._logs for call in log.calls if call.op != "barrier"]
        return [
            CollectiveCount(
                kind=kind,
                calls=sum(call.op == kind for call in issued),
                bytes=sum(log.bytes(kind) for log in self._logs),
            )
            for kind in dict.fromkeys(call.op for call in issued)
        ]
