"""The section on optimizers: its sentences and rows, the same for every form."""

from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.results import OptimizerResult, SystemResult, Verdict
from integration.optimizers import ADAM_8BIT, MUON
from integration.report.formatting import listed, out_of_tolerance, scientific, size
from integration.report.system_rows import SystemRow, rows

TITLES = {ADAM_8BIT: "8-bit Adam", MUON: "Muon"}


@dataclass(frozen=True)
class OptimizerText:
    """What the section says above its figure, and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class OptimizerRow:
    """One run: its optimizer, and what a row says of a system."""

    optimizer: str
    run: SystemRow


def optimizer_finding(results: Sequence[OptimizerResult]) -> str:
    """Return what was found: what is wrong first, then a sentence per optimizer."""
    troubles = [_trouble(each, run) for each in results for run in each.runs if not _passes(run)]
    return " ".join([*troubles, *(sentence for each in results for sentence in _good(each))])


def optimizer_text(results: Sequence[OptimizerResult]) -> OptimizerText:
    """Return the sentences around the figure and the table."""
    runs = [run for result in results for run in result.runs]
    summary = next((run.summary for run in runs if run.summary is not None), None)
    model, steps = "A small model", ""
    if summary is not None:
        model = f"{summary.model}{size(summary.parameters)}"
        steps = f" for {summary.steps} steps"
    names = listed([TITLES[result.optimizer] for result in results])
    return OptimizerText(
        subject=(
            f"{model} was trained{steps} on the same text with {names} of fsdp.optim, under DDP,"
            " where every rank has whole parameters, and under fsdp, where each has its shard:"
            " 8-bit Adam quantises blocks of 256 elements there, none of which is cut, as matrices"
            " are sharded by 32 rows, and Muon sends each matrix of the layers to one rank."
        ),
        note=(
            "Δ: the loss of a step minus that under DDP, in nats per token. The learning rates"
            " are equal, Muon's updates scaled to the size of AdamW's."
        ),
    )


def optimizer_rows(results: Sequence[OptimizerResult]) -> list[OptimizerRow]:
    """Return a printable row per run."""
    return [
        OptimizerRow(TITLES[result.optimizer], row)
        for result in results
        for row in rows(result.runs)
    ]


def _passes(run: SystemResult) -> bool:
    return run.verdict.passes


def _good(result: OptimizerResult) -> list[str]:
    """At most one sentence, on the runs with one optimizer that came to something."""
    clauses = []
    for run in result.runs[1:]:
        if run.verdict is Verdict.EQUAL:
            clauses.append(f"{run.system} is bitwise equal to {result.reference.system}")
        elif run.verdict is Verdict.WITHIN:
            assert run.deviation is not None
            clauses.append(
                f"{run.system} stays within {scientific(run.deviation.maximum)} nats per token of"
                f" {result.reference.system}"
            )
    return [f"With {TITLES[result.optimizer]}, {'; '.join(clauses)}."] if clauses else []


def _trouble(result: OptimizerResult, run: SystemResult) -> str:
    name = f"{run.system} with {TITLES[result.optimizer]}"
    if run.failure is not None:
        return f"{name} {run.failure.reason}; see {run.failure.log.name}."
    if run.verdict is Verdict.UNCOMPARED:
        return f"{name} has no {result.reference.system} to be compared with."
    assert run.deviation is not None
    return out_of_tolerance(name, run.deviation, run.tolerance)
