"""The section on kinds of parallelism: its sentences and rows, the same for every form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from integration.compare.parallel_jobs import ParallelCase
from integration.compare.parallelism import ParallelResult, ParallelVerdict
from integration.report.formatting import (
    ABSENT,
    TIMES,
    listed,
    loss_unit,
    out_of_tolerance,
    scientific,
)
from integration.report.system_rows import microbatches

# What each case is called above a column.
TITLES = {
    ParallelCase.INIT: "random init",
    ParallelCase.DROPOUT: "dropout",
    ParallelCase.BOTH: "both",
    ParallelCase.NEITHER: "neither",
}


@dataclass(frozen=True)
class ParallelText:
    """What the section says above its figure, and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class Cell:
    """One case of one row: the largest and the mean difference, ready to print."""

    maximum: str
    mean: str
    passes: bool


@dataclass(frozen=True)
class ParallelRow:
    """One model, trained one way: a cell per case, in the order of ``ParallelCase``.

    Attributes:
        microbatches: local ones of a step, ready to print.
        judged: whether it is ours, and has a verdict.
        tolerance: what is accepted, ready to print.
    """

    model: str
    way: str
    ranks: str
    microbatches: str
    judged: bool
    tolerance: str
    cells: tuple[Cell, ...]

    @property
    def passes(self) -> bool:
        """Whether every case does."""
        return all(cell.passes for cell in self.cells)


def parallel_rows(results: Sequence[ParallelResult]) -> list[ParallelRow]:
    """Return a printable row per model and way, those of a model together."""
    models = list(dict.fromkeys(result.model for result in results))
    ways = list(dict.fromkeys((result.way, result.native) for result in results))

    def place(result: ParallelResult) -> tuple[int, int]:
        return models.index(result.model), ways.index((result.way, result.native))

    together = groupby(sorted(results, key=place), key=place)
    return [_row(list(group)) for _, group in together]


def parallel_finding(results: Sequence[ParallelResult]) -> str:
    """Return what was found: what is wrong first, then how far plans are from one device."""
    ours = [result for result in results if not result.native]
    sentences = [_trouble(result) for result in results if not result.verdict.passes]
    good = [result for result in ours if result.verdict is ParallelVerdict.SAME]
    if good:
        sentences.append(f"{_worst(good)}.")
    return " ".join(sentences)


def parallel_text(results: Sequence[ParallelResult]) -> ParallelText:
    """Return the sentences around the figure and the table."""
    models = listed(list(dict.fromkeys(result.model for result in results)))
    drawn = [result for result in results if result.native and result.deviation is not None]
    native = ""
    if drawn:
        largest = max(result.deviation.maximum for result in drawn if result.deviation)
        native = (
            f" Native torch's own numbers, up to {scientific(largest)} away, stand beside them"
            " without a verdict."
        )
    return ParallelText(
        subject=(
            f"{models} were trained by plans of every kind and product of parallelism: with weights"
            " that ranks draw on their shards, with dropout, and with both; systems that draw"
            " nothing on shards, and pipelines, with neither. Each run is compared with one"
            f" device.{native}"
        ),
        note=(
            "Each case: the largest difference of a loss from one device's, and the mean; in nats"
            " per token, for a DiT in squared error per pixel. Local microbatches are those of a"
            f" step on a rank {TIMES} the samples of each. Under a plan the data parallel ranks"
            " together have the samples of one device's microbatch, for which dropout's masks are"
            " drawn. Times are not compared here."
        ),
    )


def _row(results: Sequence[ParallelResult]) -> ParallelRow:
    first = results[0]
    by_case = {result.case: result for result in results}
    return ParallelRow(
        model=first.model,
        way=f"{first.way} (native)" if first.native else first.way,
        ranks=str(first.ranks),
        microbatches=microbatches(next((each.work for each in results if each.work), None)),
        judged=not first.native,
        tolerance=scientific(first.tolerance),
        cells=tuple(_cell(by_case.get(case)) for case in ParallelCase),
    )


def _cell(result: ParallelResult | None) -> Cell:
    if result is None:
        return Cell(ABSENT, ABSENT, passes=True)
    if result.deviation is None:
        return Cell(str(result.verdict), ABSENT, result.verdict.passes)
    found = result.deviation
    return Cell(scientific(found.maximum), scientific(found.mean), result.verdict.passes)


def _trouble(result: ParallelResult) -> str:
    name = f"{result.model} by {result.way} ({TITLES[result.case]})"
    if result.failure is not None:
        return f"{name} {result.failure.reason}; see {result.failure.log.name}."
    if result.deviation is None:
        return f"{name} has no single device to be compared with."
    return out_of_tolerance(name, result.deviation, result.tolerance, loss_unit(result.model))


def _worst(good: Iterable[ParallelResult]) -> str:
    by_model: dict[str, float] = {}
    count = 0
    for result in good:
        count += 1
        assert result.deviation is not None
        worst = max(by_model.get(result.model, 0.0), result.deviation.maximum)
        by_model[result.model] = worst
    found = listed([f"{scientific(worst)} for {model}" for model, worst in by_model.items()])
    return f"In {count} runs of parallelism the largest difference from one device is {found}"
