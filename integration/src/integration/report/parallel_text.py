"""The sentences and rows of the report's section on parallelism."""

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
    scientific,
)
from integration.report.system_rows import microbatches, out_of_tolerance

# Column titles of the cases.
TITLES = {
    ParallelCase.INIT: "random init",
    ParallelCase.DROPOUT: "dropout",
    ParallelCase.BOTH: "both",
    ParallelCase.NEITHER: "neither",
}


@dataclass(frozen=True)
class ParallelText:
    """The paragraphs above the section's figure and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class Cell:
    """One case of a row: the largest and the mean difference, formatted."""

    maximum: str
    mean: str
    passes: bool


@dataclass(frozen=True)
class ParallelRow:
    """The row of a model and a variant, formatted: a cell per case, in the order of the enum.

    Attributes:
        microbatches: local microbatches of a step.
        judged: whether the row has a verdict, which native ones do not have.
        tolerance: largest accepted difference.
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
        """Whether every case passes."""
        return all(cell.passes for cell in self.cells)


def parallel_rows(results: Sequence[ParallelResult]) -> list[ParallelRow]:
    """Returns a row per model and variant, grouped by model."""
    models = list(dict.fromkeys(result.model for result in results))
    ways = list(dict.fromkeys((result.way, result.native) for result in results))

    def position(result: ParallelResult) -> tuple[int, int]:
        return models.index(result.model), ways.index((result.way, result.native))

    groups = groupby(sorted(results, key=position), key=position)
    return [_row(list(group)) for _, group in groups]


def parallel_finding(results: Sequence[ParallelResult]) -> str:
    """Returns the findings: a sentence per failed comparison, then the largest difference."""
    sentences = [_failure(result) for result in results if not result.verdict.passes]
    passed = [result for result in results if result.verdict is ParallelVerdict.SAME]
    if passed:
        sentences.append(f"{_largest_difference(passed)}.")
    return " ".join(sentences)


def parallel_text(results: Sequence[ParallelResult]) -> ParallelText:
    """Returns the paragraphs around the figure and the table."""
    models = listed(list(dict.fromkeys(result.model for result in results)))
    drawn = [result for result in results if result.native and result.deviation is not None]
    native = ""
    if drawn:
        largest = max(result.deviation.maximum for result in drawn if result.deviation)
        native = (
            f" Runs with the random numbers of native DTensor, which differ by up to"
            f" {scientific(largest)}, are shown without a verdict."
        )
    return ParallelText(
        subject=(
            f"{models} were trained with every kind of parallelism that plan-api supports, and"
            " their products: with weights that ranks draw on their shards, with dropout, and with"
            " both. Systems that draw nothing on shards, and pipelines, were trained with neither."
            f" Each run is compared with one device.{native}"
        ),
        note=(
            "Each case has the largest and the mean difference of the loss from one device's, in"
            " nats per token, for a DiT in squared error per pixel. Local microbatches: number of"
            f" microbatches of a step on a rank {TIMES} samples of each. Under a plan the"
            " microbatches of all data parallel ranks together have the size of one device's, so"
            " that dropout masks are comparable. Step times are not compared here."
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


def _failure(result: ParallelResult) -> str:
    name = f"{result.model} by {result.way} ({TITLES[result.case]})"
    if result.failure is not None:
        return f"{name} {result.failure.reason}; see {result.failure.log.name}."
    if result.deviation is None:
        return f"{name} was not compared, as the run on one device failed."
    return out_of_tolerance(name, result.deviation, result.tolerance, loss_unit(result.model))


def _largest_difference(results: Iterable[ParallelResult]) -> str:
    by_model: dict[str, float] = {}
    count = 0
    for result in results:
        count += 1
        assert result.deviation is not None
        worst = max(by_model.get(result.model, 0.0), result.deviation.maximum)
        by_model[result.model] = worst
    found = listed([f"{scientific(worst)} for {model}" for model, worst in by_model.items()])
    return f"In {count} runs of parallelism the largest difference from one device is {found}"
