"""The rows of the tables of systems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.cost import LocalWork
from integration.compare.deviation import Deviation
from integration.compare.results import SystemResult, Verdict
from integration.metrics import RunSummary
from integration.report.formatting import ABSENT, TIMES, mebibytes, scientific
from integration.report.palette import Style, Theme, style_of

_MIB = 2**20


@dataclass(frozen=True)
class SystemRow:
    """The row of a system and a model in both tables, formatted."""

    system: str
    verdict: Verdict
    ranks: str
    degree: str
    microbatches: str
    gigaflops: str
    final_loss: str
    maximum: str
    step: str
    mean: str
    tolerance: str
    step_time: str
    relative: str
    tokens_per_second: str
    memory_mean: str
    memory_max: str
    collectives: str


def rows(results: Sequence[SystemResult]) -> list[SystemRow]:
    """Returns a row per system."""
    return [_row(result) for result in results]


def _row(result: SystemResult) -> SystemRow:
    summary, found, cost = result.summary, result.deviation, result.cost
    tolerance = ABSENT if result.verdict is Verdict.REFERENCE else scientific(result.tolerance)
    relative = result.relative_step_time
    return SystemRow(
        system=result.system,
        verdict=result.verdict,
        ranks=str(result.ranks),
        degree=str(summary.data_parallel_degree) if summary else ABSENT,
        microbatches=microbatches(result.work),
        gigaflops=_gigaflops(result.work),
        final_loss=f"{result.losses[-1]:.6f}" if summary else ABSENT,
        maximum=scientific(found.maximum) if found else ABSENT,
        step=str(found.step) if found and not found.bitwise_equal else ABSENT,
        mean=scientific(found.mean) if found else ABSENT,
        tolerance=tolerance,
        step_time=f"{cost.step_seconds * 1e3:,.0f} ms" if cost else ABSENT,
        relative=f"{relative:.2f}{TIMES}" if relative is not None else ABSENT,
        tokens_per_second=f"{cost.tokens_per_second:,.0f}" if cost else ABSENT,
        memory_mean=f"{cost.peak_rss_mean / _MIB:,.0f} MiB" if cost else ABSENT,
        memory_max=f"{cost.peak_rss_max / _MIB:,.0f} MiB" if cost else ABSENT,
        collectives=_collectives(summary),
    )


def microbatches(work: LocalWork | None) -> str:
    """Returns a rank's number of microbatches in a step, times the samples of each."""
    return ABSENT if work is None else f"{work.microbatches} {TIMES} {work.samples}"


def _gigaflops(work: LocalWork | None) -> str:
    return ABSENT if work is None or work.flops is None else f"{work.flops / 1e9:.3g}"


def _collectives(summary: RunSummary | None) -> str:
    if summary is None or summary.collectives is None:
        return ABSENT
    kinds = (f"{each.calls} {each.kind}, {mebibytes(each.bytes)}" for each in summary.collectives)
    return "; ".join(kinds) or "none"


def styles(results: Sequence[SystemResult], theme: Theme) -> dict[str, Style]:
    """Returns the style of every system by name."""
    return {result.system: style_of(result.system, theme) for result in results}


def label(result: SystemResult) -> str:
    """Returns a system's label in a figure."""
    return f"{result.system} (failed)" if result.verdict is Verdict.FAILED else result.system


def out_of_tolerance(
    name: str, found: Deviation, tolerance: float, unit: str = "nats per token"
) -> str:
    """Returns the sentence on a run whose losses exceed the tolerance."""
    if math.isnan(found.maximum):
        return f"The loss of {name} is not finite from step {found.step} on."
    return (
        f"{name} exceeds its tolerance: it differs by {scientific(found.maximum)} {unit} at step"
        f" {found.step}, and the tolerance is {scientific(tolerance)}."
    )
