"""The sentences and rows of the report's section on random numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.deviation import Deviation
from integration.compare.random_jobs import DROPOUT, RANKS, RandomCase, Source
from integration.compare.random_numbers import RandomResult, RandomVerdict
from integration.report.formatting import ABSENT, listed, scientific, size
from integration.report.system_rows import out_of_tolerance

CASES = {RandomCase.INIT: "random init", RandomCase.DROPOUT: "dropout"}
_DRAWN = {RandomCase.INIT: "initial weights", RandomCase.DROPOUT: "dropout masks"}


@dataclass(frozen=True)
class RandomText:
    """The paragraphs above the section's figure and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class RandomRow:
    """The row of one run, formatted.

    Attributes:
        mark: mark before the verdict; empty without a verdict.
        run: the system and its ranks.
        source: source of the random numbers on shards; `ABSENT` on one device.
    """

    case: str
    run: str
    ranks: str
    source: str
    verdict: RandomVerdict
    mark: str
    weights: str
    masks: str
    maximum: str
    step: str
    tolerance: str
    final_loss: str


def random_finding(results: Sequence[RandomResult]) -> str:
    """Returns the findings: a sentence per failed comparison, then one per case."""
    sentences = [_failure(result) for result in results if not result.verdict.passes]
    for case in RandomCase:
        sentences += _case_finding(case, [result for result in results if result.case is case])
    return " ".join(sentences)


def random_text(results: Sequence[RandomResult]) -> RandomText:
    """Returns the paragraphs around the figure and the table."""
    summary = next((each.summary for each in results if each.summary is not None), None)
    model, steps = "A small model", ""
    if summary is not None:
        model = f"{summary.model}{size(summary.parameters)}"
        steps = f" for {summary.steps} steps"
    ranks = listed([str(each) for each in RANKS])
    return RandomText(
        subject=(
            f"{model} was trained{steps} on the same text, on a single device and by dtensor-tp on"
            f" {ranks} ranks, which draw random numbers on shards. With random init, each rank"
            " draws its shards of the weights. With dropout, ranks draw the masks of attention"
            f" (p = {DROPOUT}) and start from equal weights. Ranks take the microbatches of one"
            " device. Each case ran once with native DTensor and once with dist-rng. Where the"
            " numbers are equal, the remaining difference comes from the order of reductions."
        ),
        note=(
            "Equal means bit for bit, by SHA-256 of all weights before the first step and of the"
            " mask of every dropout in the first step, both gathered from the ranks. Native DTensor"
            " is shown for comparison, without a verdict."
        ),
    )


def random_rows(results: Sequence[RandomResult]) -> list[RandomRow]:
    """Returns a row per run."""
    return [_row(result) for result in results]


def _case_finding(case: RandomCase, results: Sequence[RandomResult]) -> list[str]:
    """Returns at most one sentence, on the runs of one case that finished."""
    same = [each for each in results if each.verdict is RandomVerdict.SAME]
    clauses = []
    if same:
        ranks = listed([str(each.ranks) for each in same])
        clauses.append(
            f"dist-rng on {ranks} ranks draws the {_DRAWN[case]} of the single device, bit for bit,"
            f" and its losses are within {scientific(_largest(same))} nats per token"
        )
    native = [each for each in results if each.verdict is RandomVerdict.UNJUDGED]
    if native:
        clauses.append(f"losses with native DTensor differ by up to {scientific(_largest(native))}")
    return [f"With {CASES[case]}, {'; '.join(clauses)}."] if clauses else []


def _largest(results: Sequence[RandomResult]) -> float:
    maxima = [each.deviation.maximum for each in results if each.deviation is not None]
    return max(maxima, key=lambda value: (math.isnan(value), value))


def _failure(result: RandomResult) -> str:
    if result.failure is not None:
        return f"{result.name} {result.failure.reason}; see {result.failure.log.name}."
    if result.verdict is RandomVerdict.UNCOMPARED:
        return f"{result.name} was not compared, as the run on one device failed."
    if result.verdict is RandomVerdict.OUTSIDE:
        assert result.deviation is not None
        return out_of_tolerance(result.name, result.deviation, result.tolerance)
    kinds = {"initial weights": result.same_weights, "dropout masks": result.same_masks}
    other = [kind for kind, same in kinds.items() if same is False]
    return f"The {listed(other)} of {result.name} differ from the single device's."


def _row(result: RandomResult) -> RandomRow:
    found, judged = result.deviation, result.source is not Source.NATIVE
    on_shards = result.ranks > 1
    mark = "" if result.verdict is RandomVerdict.UNJUDGED else _MARKS[result.verdict.passes]
    ranks = f", {result.ranks} ranks" if on_shards else ""
    return RandomRow(
        case=CASES[result.case],
        run=f"{result.system}{ranks}",
        ranks=str(result.ranks),
        source=str(result.source) if on_shards else ABSENT,
        verdict=result.verdict,
        mark=mark,
        weights=_SAME[result.same_weights],
        masks=_SAME[result.same_masks],
        maximum=scientific(found.maximum) if found else ABSENT,
        step=_step(found),
        tolerance=scientific(result.tolerance) if judged else ABSENT,
        final_loss=f"{result.records[-1].loss:.6f}" if result.summary else ABSENT,
    )


def _step(found: Deviation | None) -> str:
    return str(found.step) if found and not found.bitwise_equal else ABSENT


_SAME = {True: "equal", False: "differ", None: ABSENT}
_MARKS = {True: "\N{CHECK MARK}", False: "\N{BALLOT X}"}
