"""The section on random numbers: its sentences and rows, the same for every form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.deviation import Deviation
from integration.compare.random_jobs import DROPOUT, RANKS, RandomCase, Source
from integration.compare.random_numbers import RandomResult, RandomVerdict
from integration.report.formatting import ABSENT, listed, out_of_tolerance, scientific, size

CASES = {RandomCase.INIT: "random init", RandomCase.DROPOUT: "dropout"}
_DRAWN = {RandomCase.INIT: "initial weights", RandomCase.DROPOUT: "dropout masks"}


@dataclass(frozen=True)
class RandomText:
    """What the section says above its figure, and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class RandomRow:
    """One run, every cell ready to print.

    Attributes:
        mark: in front of the verdict; none where nothing was judged.
        run: the system and its ranks.
        source: who drew random numbers on shards; absent on one device, which has none.
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
    """Return what was found: what is wrong first, then a sentence per case."""
    sentences = [_trouble(result) for result in results if not result.verdict.passes]
    for case in RandomCase:
        sentences += _case_finding(case, [result for result in results if result.case is case])
    return " ".join(sentences)


def random_text(results: Sequence[RandomResult]) -> RandomText:
    """Return the sentences around the figure and the table."""
    summary = next((each.summary for each in results if each.summary is not None), None)
    model, steps = "A small model", ""
    if summary is not None:
        model = f"{summary.model}{size(summary.parameters)}"
        steps = f" for {summary.steps} steps"
    ranks = listed([str(each) for each in RANKS])
    return RandomText(
        subject=(
            f"{model} was trained{steps} on the same text, on a single device and cut by"
            f" dtensor-tp over {ranks} ranks, where random numbers are drawn on shards. With random"
            " init these are the weights: each rank draws its part of parameters that are sharded"
            f" already. With dropout they are the masks of attention (p = {DROPOUT}), from equal"
            " weights. Ranks take one device's microbatches. Each was done once as stock"
            " DTensor draws and once with dist-rng installed."
            " Where the numbers are equal, what remains of a difference is the order of reductions."
        ),
        note=(
            "Equal is bit for bit, by SHA-256: of all weights before the first step, and of the"
            " mask of every dropout in the first step, both gathered from the ranks. Native DTensor"
            " is shown for comparison and gets no verdict."
        ),
    )


def random_rows(results: Sequence[RandomResult]) -> list[RandomRow]:
    """Return a printable row per run."""
    return [_row(result) for result in results]


def _case_finding(case: RandomCase, results: Sequence[RandomResult]) -> list[str]:
    """At most one sentence, on the runs of one case that came to something."""
    same = [each for each in results if each.verdict is RandomVerdict.SAME]
    clauses = []
    if same:
        ranks = listed([str(each.ranks) for each in same])
        clauses.append(
            f"dist-rng gives {ranks} ranks the {_DRAWN[case]} of the single device, bit for bit,"
            f" and losses within {scientific(_largest(same))} nats per token of its own"
        )
    native = [each for each in results if each.verdict is RandomVerdict.UNJUDGED]
    if native:
        whose = "native DTensor's" if same else "the losses of native DTensor"
        clauses.append(f"{whose} differ by up to {scientific(_largest(native))}")
    return [f"With {CASES[case]}, {'; '.join(clauses)}."] if clauses else []


def _largest(results: Sequence[RandomResult]) -> float:
    maxima = [each.deviation.maximum for each in results if each.deviation is not None]
    return max(maxima, key=lambda value: (math.isnan(value), value))


def _trouble(result: RandomResult) -> str:
    if result.failure is not None:
        return f"{result.name} {result.failure.reason}; see {result.failure.log.name}."
    if result.verdict is RandomVerdict.UNCOMPARED:
        return f"{result.name} has no single device to be compared with."
    if result.verdict is RandomVerdict.OUTSIDE:
        assert result.deviation is not None
        return out_of_tolerance(result.name, result.deviation, result.tolerance)
    kinds = {"initial weights": result.same_weights, "dropout masks": result.same_masks}
    other = [kind for kind, same in kinds.items() if same is False]
    return f"{result.name} has other {listed(other)} than the single device."


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
