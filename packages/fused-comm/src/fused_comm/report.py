"""What a reducer's last step sent, and for how long the host stood still for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BucketReport", "Report"]


@dataclass(frozen=True)
class BucketReport:
    """One bucket in the last step.

    Attributes:
        names: of the parameters in it, in the order in which their gradients come.
        route: what was done, as ``"all-reduce over 4, float32"``.
        nbytes: of its buffer.
        collectives: that were made.
        launched: when it was sent, in seconds since the first was.
        waits: begin and end of each wait of the host, in the same seconds; on a GPU the host only
            hands the wait to the stream.
    """

    names: tuple[str, ...]
    route: str
    nbytes: int
    collectives: int
    launched: float
    waits: tuple[tuple[float, float], ...]

    @property
    def exposed(self) -> float:
        """Seconds in which the host did nothing but wait for it."""
        return sum(end - begin for begin, end in self.waits)

    @property
    def hidden(self) -> float:
        """Seconds between the first of its collectives and the end of the last, less those."""
        landed = max((end for _, end in self.waits), default=self.launched)
        return landed - self.launched - self.exposed


@dataclass(frozen=True)
class Report:
    """The last step's buckets, in the order in which they were sent; `str` makes a table."""

    buckets: tuple[BucketReport, ...]

    @property
    def collectives(self) -> int:
        """How many were made."""
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
        """Draws when each bucket was on its way and waited for; needs matplotlib.

        Args:
            path: of the picture; its suffix says the format.

        Raises:
            ImportError: matplotlib is not installed (`pip install fused-comm[report]`).
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 1 + 0.3 * max(1, len(self.buckets))), layout="constrained")
        axes = figure.subplots()
        axes.barh([0], [0], color="tab:blue", label="on its way")
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
    """Columns as wide as their widest; numbers to the right, the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([*cells[:-1], row[-1]]).rstrip())
    return "\n".join(lines)
