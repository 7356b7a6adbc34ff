"""Counts the collectives and FLOPs of one step from torch's execution trace.

A dispatch mode would change how DTensors are dispatched; testkit's `CommLog` reads the execution
trace instead. Tracing makes the counted step slower, so that its time should not be measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from integration.train.measurement.memory import peak_rss_bytes, reset_peak_rss
from integration.train.metrics import CollectiveCount
from testkit import CommLog

# A barrier has no payload, and its sender counts what a rank receives.
NOT_COUNTED = ("barrier", "recv")


class CollectiveCounter:
    """Counts the collectives and FLOPs of this rank in one step.

    Args:
        step: number of the step, counted from 1; None: no step is counted.
    """

    def __init__(self, step: int | None) -> None:
        self._step = step
        self._logs: list[CommLog] = []
        self._peak = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Encloses a part of step ``number``, which may have several parts."""
        if number != self._step:
            yield
            return
        # The memory of tracing does not count as the run's.
        self._peak = self.peak_rss_bytes
        with CommLog() as log:
            yield
        self._logs.append(log)
        reset_peak_rss()

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory of this process, without that of counting."""
        return max(self._peak, peak_rss_bytes())

    @property
    def product_flops(self) -> int | None:
        """FLOPs of this rank's matrix products and attention; None if no step was counted."""
        return sum(log.product_flops for log in self._logs) if self._logs else None

    @property
    def counts(self) -> list[CollectiveCount] | None:
        """Counts by kind, in order of first use, without barriers; None if no step was counted.

        A point-to-point transfer is counted once, by the rank that sends it.
        """
        if not self._logs:
            return None
        issued = [call for log in self._logs for call in log.calls if call.op not in NOT_COUNTED]
        return [
            CollectiveCount(
                kind=kind,
                calls=sum(call.op == kind for call in issued),
                bytes=sum(log.bytes(kind) for log in self._logs),
            )
            for kind in dict.fromkeys(call.op for call in issued)
        ]
