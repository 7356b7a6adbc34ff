"""What is measured of a run: the deviation of its losses, its local work, step time and memory."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from integration.train.metrics import RunSummary, StepRecord

# The first steps allocate memory, fill caches and create communicators.
WARM_UP_STEPS = 3
# The FLOPs of experts vary by less where tokens are routed differently.
_SAME_FLOPS = 0.01


@dataclass(frozen=True)
class Deviation:
    """The deviation of a curve from the reference, in units of the loss.

    Attributes:
        differences: |loss - reference| of every step; not finite where either loss is not.
        maximum: largest difference; NaN if any is NaN.
        step: first step with the largest difference, counted from 1.
        mean: mean difference.
    """

    differences: tuple[float, ...]
    maximum: float
    step: int
    mean: float

    @property
    def bitwise_equal(self) -> bool:
        """Whether the two curves are equal at every step."""
        return self.maximum == 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """The key that orders deviations by their maximum, NaN as the largest."""
        return math.isnan(self.maximum), self.maximum

    def within(self, tolerance: float) -> bool:
        """Returns whether no difference exceeds ``tolerance``; NaN exceeds any."""
        return self.maximum <= tolerance


def deviation(losses: Sequence[float], reference: Sequence[float]) -> Deviation:
    """Returns the deviation of ``losses`` from ``reference``.

    Raises:
        ValueError: the curves are empty or differ in length.
    """
    if not losses or len(losses) != len(reference):
        raise ValueError(
            "deviation: expected two curves of the same number of steps, at least one, got"
            f" {len(losses)} and {len(reference)}; compare runs with equal --steps"
        )
    differences = tuple(abs(a - b) for a, b in zip(losses, reference, strict=True))
    # NaN counts as the largest: max() alone would ignore it.
    worst = max(
        range(len(differences)),
        key=lambda index: (math.isnan(differences[index]), differences[index], -index),
    )
    return Deviation(
        differences=differences,
        maximum=differences[worst],
        step=worst + 1,
        mean=math.fsum(differences) / len(differences)
        if all(map(math.isfinite, differences))
        else math.nan,
    )


@dataclass(frozen=True)
class LocalWork:
    """What the first rank computes in a step; step times of equal local work are comparable.

    Attributes:
        microbatches: number of microbatches.
        samples: samples of a microbatch. Ranks of one model replica, as in tensor parallelism,
            take the same samples and divide the work.
        flops: FLOPs of the matrix products and the attention of one microbatch, averaged over the
            step in which collectives were counted; None if no step was counted.
    """

    microbatches: int
    samples: int
    flops: int | None

    def equals(self, other: "LocalWork") -> bool:
        """Returns whether a microbatch is the same work: equal samples, and FLOPs within 1 %.

        Without counted FLOPs it is not known to be: ranks of one replica divide the work.
        """
        if self.flops is None or other.flops is None or self.samples != other.samples:
            return False
        return math.isclose(self.flops, other.flops, rel_tol=_SAME_FLOPS)


def local_work(summary: RunSummary) -> LocalWork:
    """Returns the local work of a finished run."""
    count, flops = summary.accumulation, summary.product_flops
    return LocalWork(count, summary.micro_batch, None if flops is None else flops // count)


@dataclass(frozen=True)
class Cost:
    """Seconds per step after the warm-up, and resident memory in bytes.

    Attributes:
        step_seconds: median of the steps.
        quartiles: first and third quartile, both the median if one step is measured.
        tokens_per_second: throughput of all ranks at the median.
        peak_rss_mean: peak resident memory, averaged over the ranks.
        peak_rss_max: largest peak resident memory of a rank.
    """

    step_seconds: float
    quartiles: tuple[float, float]
    tokens_per_second: float
    peak_rss_mean: float
    peak_rss_max: int


def cost(records: Sequence[StepRecord], summary: RunSummary) -> Cost:
    """Returns the cost of a finished run; if it has only warm-up steps, of its last step."""
    measured = records[min(WARM_UP_STEPS, len(records) - 1) :]
    seconds = [record.seconds for record in measured]
    median = statistics.median(seconds)
    low, high = median, median
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Cost(
        step_seconds=median,
        quartiles=(low, high),
        tokens_per_second=measured[-1].tokens / median,
        peak_rss_mean=statistics.fmean(summary.peak_rss_bytes),
        peak_rss_max=max(summary.peak_rss_bytes),
    )
