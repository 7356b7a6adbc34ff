"""Verdicts and table rows that experiments have in common."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from integration.compare.measurements import LocalWork
from integration.compare.result import Result, Verdict
from integration.report.formatting import ABSENT, TIMES, listed, loss_unit, scientific, size
from integration.report.section import Cell, Column, Table, VerdictRow


@dataclass(frozen=True)
class Field:
    """A column of a table of results, and the cell of a result in it."""

    column: Column
    cell: Callable[[Result], Cell | str]


def results_table(results: Sequence[Result], *columns: Field, title: str = "") -> Table:
    """Returns a table with a row per result."""
    rows = tuple(tuple(each.cell(result) for each in columns) for result in results)
    return Table(tuple(each.column for each in columns), rows, title)


def number(
    title: str, cell: Callable[[Result], Cell | str], *, terminal: str | None = None
) -> Field:
    """Returns a column of numbers."""
    return Field(Column(title, is_number=True, terminal=terminal), cell)


def verdict_cell(result: Result) -> Cell:
    """Returns the cell of a verdict, marked unless the run has none."""
    unjudged = result.verdict is Verdict.UNJUDGED
    return Cell(str(result.verdict), passes=None if unjudged else result.verdict.passes)


def _maximum(result: Result) -> str:
    return scientific(result.deviation.maximum) if result.deviation else ABSENT


def _step(result: Result) -> str:
    found = result.deviation
    return str(found.step) if found and not found.bitwise_equal else ABSENT


def _mean(result: Result) -> str:
    return scientific(result.deviation.mean) if result.deviation else ABSENT


def _tolerance(result: Result) -> str:
    run = result.run
    return scientific(run.tolerance) if run.judged and run.reference else ABSENT


def _final_loss(result: Result) -> str:
    return f"{result.losses[-1]:.6f}" if result.summary else ABSENT


def microbatches(work: LocalWork | None) -> str:
    """Returns a rank's number of microbatches in a step, times the samples of each."""
    return ABSENT if work is None else f"{work.microbatches} {TIMES} {work.samples}"


SYSTEM = Field(
    Column("system", terminal="system"), lambda each: Cell(each.system, series=each.system)
)
VERDICT = Field(Column("verdict", terminal="verdict"), verdict_cell)
MAXIMUM = number("max |Δ|", _maximum, terminal="max |Δ|")
STEP = number("at step", _step)
MEAN = number("mean |Δ|", _mean)
TOLERANCE = number("tolerance", _tolerance)
FINAL_LOSS = number("final loss", _final_loss, terminal="final loss")
RANKS = number("ranks", lambda result: str(result.run.job.ranks))
MICROBATCHES = number("local microbatches", lambda result: microbatches(result.work))
# The columns on the losses of a run.
LOSS_COLUMNS = (VERDICT, MAXIMUM, STEP, MEAN, TOLERANCE, FINAL_LOSS, RANKS)


def verdict_row(subject: str, results: Sequence[Result], finding: str = "") -> VerdictRow:
    """Returns the row of an experiment, or of one of its models or cases.

    Args:
        subject: what was compared.
        results: its results, with their references.
        finding: a sentence to add on the runs that passed; empty: whether they are bitwise equal.
    """
    judged = [each for each in results if each.run.judged and each.run.reference]
    compared = [each for each in judged if each.deviation is not None]
    failed = [each for each in results if not each.verdict.passes]
    largest, tolerance, where = "", "", ""
    if compared:
        worst = largest_of(compared)
        assert worst.deviation is not None
        largest = f"{scientific(worst.deviation.maximum)} {loss_unit(worst.model)}"
        if worst.verdict.passes and not worst.deviation.bitwise_equal:
            step = worst.deviation.step
            where = f"The largest difference is that of {worst.run.title} at step {step}."
    if judged:
        tolerance = listed([scientific(each) for each in sorted({r.run.tolerance for r in judged})])
    titles = {each.run.job.name: each.run.title for each in results}
    sentences = [*_failures(failed, titles), where, finding or _equal(compared, titles)]
    return VerdictRow(
        subject=subject,
        passes=not failed if failed or judged else None,
        largest=largest,
        tolerance=tolerance,
        finding=" ".join(sentence for sentence in sentences if sentence),
    )


def largest_of(results: Sequence[Result]) -> Result:
    """Returns the result with the largest deviation, of results that have one."""
    return max(results, key=lambda each: each.deviation.rank if each.deviation else (False, -1.0))


def trained(results: Sequence[Result], name: str) -> str:
    """Returns a model's name with its number of parameters, if a run of it has finished."""
    summary = next((each.summary for each in results if each.summary is not None), None)
    return name if summary is None else f"{name}{size(summary.parameters)}"


def _equal(compared: Sequence[Result], titles: Mapping[str, str]) -> str:
    """Returns a sentence on the runs that are bitwise equal to their reference, if any."""
    equal = [each for each in compared if each.verdict is Verdict.EQUAL]
    if not equal:
        return ""
    verb = "is" if len(equal) == 1 else "are"
    steps = f"for {equal[0].run.first_steps} steps" if equal[0].run.first_steps else "at every step"
    reference = titles[equal[0].run.reference or ""]
    names = listed([each.system for each in equal])
    return f"{names} {verb} bitwise equal to {reference} {steps}."


def _failures(failed: Sequence[Result], titles: Mapping[str, str]) -> list[str]:
    """Returns a sentence per failed run, and one on those that were not compared."""
    sentences = [
        _failure(each, titles) for each in failed if each.verdict is not Verdict.UNCOMPARED
    ]
    uncompared: dict[str, list[str]] = {}
    for each in failed:
        if each.verdict is Verdict.UNCOMPARED:
            uncompared.setdefault(titles[each.run.reference or ""], []).append(each.run.title)
    for reference, names in uncompared.items():
        verb = "was" if len(names) == 1 else "were"
        sentences.append(f"{listed(names)} {verb} not compared, as {reference} failed.")
    return sentences


def _failure(result: Result, titles: Mapping[str, str]) -> str:
    title = result.run.title
    if result.failure is not None:
        return f"{title} {result.failure.reason}; see {result.failure.log.name}."
    if result.verdict is Verdict.OTHER:
        reference = titles[result.run.reference or ""]
        other = [result.run.equal[name] for name, same in result.equal.items() if not same]
        return f"The {listed(other)} of {title} differ from those of {reference}."
    found = result.deviation
    assert found is not None
    if math.isnan(found.maximum):
        return f"The loss of {title} is not finite from step {found.step} on."
    return (
        f"{title} exceeds its tolerance: it differs by {scientific(found.maximum)}"
        f" {loss_unit(result.model)} at step {found.step}, and the tolerance is"
        f" {scientific(result.run.tolerance)}."
    )
