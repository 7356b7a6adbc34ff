"""What a run computed on a rank, and what it cost: time per step and memory."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from integration.metrics import RunSummary, StepRecord

# The first steps allocate, fill caches and build communicators.
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class LocalWork:
    """What the first rank computes in a step; runs of equal work are fair to compare.

    Attributes:
        microbatches: their number.
        samples: that each of them has. Ranks that share a model, as those of tensor parallelism,
            take the same samples, and divide their work.
        flops: of the matrix products and the attention of one microbatch, the mean of the step in
            which collectives were counted; None where no step was.
    """

    microbatches: int
    samples: int
    flops: int | None


def local_work(summary: RunSummary) -> LocalWork:
    """Return the local work of a finished run."""
    count, flops = summary.accumulation, summary.product_flops
    return LocalWork(count, summary.micro_batch, None if flops is None else flops // count)


@dataclass(frozen=True)
class Cost:
    """Seconds per step after the warm-up, and resident memory in bytes.

    Attributes:
        step_seconds: the median.
        quartiles: the first and the third, equal to the median where one step is measured.
        tokens_per_second: of the global batch, at the median.
        peak_rss_mean: mean over the ranks of each one's peak.
        peak_rss_max: the largest peak of a rank.
    """

    step_seconds: float
    quartiles: tuple[float, float]
    tokens_per_second: float
    peak_rss_mean: float
    peak_rss_max: int


def cost(records: Sequence[StepRecord], summary: RunSummary) -> Cost:
    """Return the cost of a finished run; one of few steps is measured by its last."""
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
