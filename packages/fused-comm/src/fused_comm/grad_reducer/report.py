"""Reports what a reducer's last step sent, and how long the host waited for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BucketReport", "Report"]


@dataclass(frozen=True)
class BucketReport:
    """One bucket of the last step.

    Attributes:
        names: of its parameters, in the order in which their gradients are computed.
        route: its collectives, as ``"all-reduce over 4, float32"``.
        nbytes: of its buffer.
        collectives: the number that was issued.
        launched: when it was sent, in seconds since the first bucket was.
        waits: begin and end of each wait of the host, in the same seconds; on a GPU the host only
            enqueues the wait on the stream.
    """

    names: tuple[str, ...]
    route: str
    nbytes: int
    collectives: int
    launched: float
    waits: tuple[tuple[float, float], ...]

    @property
    def exposed(self) -> float:
        """Seconds in which the host waited for it."""
        return sum(end - begin for begin, end in self.waits)

    @property
    def hidden(self) -> float:
        """Seconds from its launch to the end of its last collective, without the exposed ones."""
        received = max((end for _, end in self.waits), default=self.launched)
        return received - self.launched - self.exposed


@dataclass(frozen=True)
class Report:
    """The last step's buckets, in the order in which they were sent; `str` makes a table."""

    buckets: tuple[BucketReport, ...]

    @property
    def collectives(self) -> int:
        """The number of collectives that were issued."""
        return sum(bucket.collectives for bucket in self.buckets)

    def __str__(self) -> str:
        head = ("bucket", "gradients", "MB", "collectives", "hidden ms", "exposed ms", "route")
        rows = [
            (
                str(number),
                str(len(bucket.names)),
                f"{bucket.nbytes / 2**20:.3f}",
                str(bucket.collectives),
                f"{1e3 * bucket.hidden:.2f}",
                f"{1e3 * bucket.exposed:.2f}",
                bucket.route,
            )
            for number, bucket in enumerate(self.buckets)
        ]
        total = (
            "total",
            str(sum(len(bucket.names) for bucket in self.buckets)),
            f"{sum(bucket.nbytes for bucket in self.buckets) / 2**20:.3f}",
            str(self.collectives),
            f"{1e3 * sum(bucket.hidden for bucket in self.buckets):.2f}",
            f"{1e3 * sum(bucket.exposed for bucket in self.buckets):.2f}",
            "",
        )
        return _table([head, *rows, total])

    def save_timeline(self, path: str | Path) -> None:
        """Draws when each bucket was in flight and waited for; requires matplotlib.

        Args:
            path: of the picture; its suffix is the format.

        Raises:
            ImportError: matplotlib is not installed (`pip install fused-comm[report]`).
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1 + 0.3 * max(1, len(self.buckets))), layout="constrained")
        axes = figure.subplots()
        axes.barh([0], [0], color="tab:blue", label="in flight")
        axes.barh([0], [0], color="tab:orange", label="waited for")
        for number, bucket in enumerate(self.buckets):
            seconds = bucket.hidden + bucket.exposed
            axes.barh(number, 1e3 * seconds, left=1e3 * bucket.launched, color="tab:blue")
            for begin, end in bucket.waits:
                axes.barh(number, 1e3 * (end - begin), left=1e3 * begin, color="tab:orange")
        axes.set(xlabel="milliseconds since the first was sent", ylabel="bucket")
        axes.set_yticks(range(len(self.buckets)))
        axes.invert_yaxis()
        axes.legend(loc="upper right")
        figure.savefig(path)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns: numbers to the right, the last column to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([*cells[:-1], row[-1]]).rstrip())
    return "\n".join(lines)
