"""The sentences and rows of the report's section on optimizers."""

from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.results import OptimizerResult, SystemResult, Verdict
from integration.optimizers import ADAM_8BIT, MUON
from integration.report.formatting import listed, scientific, size
from integration.report.system_rows import SystemRow, out_of_tolerance, rows

TITLES = {ADAM_8BIT: "8-bit Adam", MUON: "Muon"}


@dataclass(frozen=True)
class OptimizerText:
    """The paragraphs above the section's figure and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class OptimizerRow:
    """The row of one run: its optimizer, and its system's row."""

    optimizer: str
    run: SystemRow


def optimizer_finding(results: Sequence[OptimizerResult]) -> str:
    """Returns the findings: a sentence per failed comparison, then one per optimizer."""
    failed = [_failure(each, run) for each in results for run in each.runs if not _passes(run)]
    return " ".join([*failed, *(sentence for each in results for sentence in _passed(each))])


def optimizer_text(results: Sequence[OptimizerResult]) -> OptimizerText:
    """Returns the paragraphs around the figure and the table."""
    runs = [run for result in results for run in result.runs]
    summary = next((run.summary for run in runs if run.summary is not None), None)
    model, steps = "A small model", ""
    if summary is not None:
        model = f"{summary.model}{size(summary.parameters)}"
        steps = f" for {summary.steps} steps"
    names = listed([TITLES[result.optimizer] for result in results])
    return OptimizerText(
        subject=(
            f"{model} was trained{steps} on the same text with {names} of fsdp.optim: under DDP,"
            " which replicates parameters, and under fsdp, which shards them. 8-bit Adam quantises"
            " blocks of 256 elements, which fsdp keeps on one rank by sharding matrices in units of"
            " 32 rows; Muon gathers each matrix of the layers on one rank."
        ),
        note=(
            "Δ: the loss of a step minus the loss under DDP, in nats per token. All optimizers"
            " have the same learning rate; Muon's updates are scaled to the size of AdamW's."
        ),
    )


def optimizer_rows(results: Sequence[OptimizerResult]) -> list[OptimizerRow]:
    """Returns a row per run."""
    return [
        OptimizerRow(TITLES[result.optimizer], row)
        for result in results
        for row in rows(result.runs)
    ]


def _passes(run: SystemResult) -> bool:
    return run.verdict.passes


def _passed(result: OptimizerResult) -> list[str]:
    """Returns at most one sentence, on the runs with one optimizer that passed."""
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


def _failure(result: OptimizerResult, run: SystemResult) -> str:
    name = f"{run.system} with {TITLES[result.optimizer]}"
    if run.failure is not None:
        return f"{name} {run.failure.reason}; see {run.failure.log.name}."
    if run.verdict is Verdict.UNCOMPARED:
        return f"{name} was not compared, as {result.reference.system} failed."
    assert run.deviation is not None
    return out_of_tolerance(name, run.deviation, run.tolerance)
