"""Local work, step time and memory of a run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from integration.metrics import RunSummary, StepRecord

# The first steps allocate memory, fill caches and create communicators.
WARM_UP_STEPS = 3


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
