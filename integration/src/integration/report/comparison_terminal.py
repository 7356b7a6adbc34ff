"""Prints short tables of the results at the end of the command."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from integration.compare.parallel_jobs import ParallelCase
from integration.compare.parallelism import ParallelResult
from integration.compare.random_numbers import RandomResult, RandomVerdict
from integration.compare.results import (
    DiffusionResult,
    OptimizerResult,
    Results,
    SystemResult,
    by_model,
)
from integration.report.diffusion_text import diffusion_rows
from integration.report.formatting import ABSENT, TIMES
from integration.report.optimizer_text import optimizer_rows
from integration.report.page_text import whole_finding
from integration.report.parallel_text import TITLES, parallel_rows
from integration.report.random_text import random_rows
from integration.report.system_rows import rows


def print_results(results: Results, report: Path, console: Console) -> None:
    """Prints a row per run, the findings, and the path of the report."""
    console.print()
    for model, same in by_model(results.systems).items():
        console.print(Text(model, "bold"))
        console.print(_systems_table(same))
        console.print()
    if results.random_numbers:
        console.print(_random_table(results.random_numbers))
        console.print()
    if results.optimizers:
        console.print(_optimizer_table(results.optimizers))
        console.print()
    if results.parallelism:
        console.print(_parallel_table(results.parallelism))
        console.print()
    if results.diffusion is not None:
        console.print(_diffusion_table(results.diffusion))
        console.print()
    good = results.passes
    verdict = Text("passes: " if good else "DOES NOT PASS: ", "green" if good else "bold red")
    console.print(verdict + Text(whole_finding(results)), soft_wrap=True)
    console.print(Text(f"report: {report}"), soft_wrap=True)


def _systems_table(results: Sequence[SystemResult]) -> Table:
    work = ("micro-\nbatch", "GFLOP")
    cost = ("step,\nms", f"{TIMES}\nsingle", "MiB", "calls")
    table = _table("system", "verdict", numbers=("max |Δ|", *work, *cost))
    for row, result in zip(rows(results), results, strict=True):
        counts = result.summary.collectives if result.summary else None
        table.add_row(
            row.system,
            _verdict(row.verdict, passes=row.verdict.passes),
            row.maximum,
            row.microbatches,
            row.gigaflops,
            row.step_time.removesuffix(" ms"),
            row.relative.removesuffix(TIMES),
            row.memory_mean.removesuffix(" MiB"),
            ABSENT if counts is None else str(sum(each.calls for each in counts)),
        )
    return table


def _random_table(results: Sequence[RandomResult]) -> Table:
    table = _table("on shards", "drawn by", "verdict", "weights", "masks", numbers=("max |Δ|",))
    # A reference that finished has nothing to show here.
    shown = [result for result in results if result.verdict is not RandomVerdict.REFERENCE]
    for row in random_rows(shown):
        judged = row.verdict is not RandomVerdict.UNJUDGED
        table.add_row(
            f"{row.case}, {row.ranks} ranks" if row.source != ABSENT else row.case,
            row.source,
            _verdict(row.verdict, passes=row.verdict.passes) if judged else Text(row.verdict),
            row.weights,
            row.masks,
            row.maximum,
        )
    return table


def _optimizer_table(results: Sequence[OptimizerResult]) -> Table:
    table = _table("optimizer", "system", "verdict", numbers=("max |Δ|", "final loss"))
    for row in optimizer_rows(results):
        run = row.run
        verdict = _verdict(run.verdict, passes=run.verdict.passes)
        table.add_row(row.optimizer, run.system, verdict, run.maximum, run.final_loss)
    return table


def _parallel_table(results: Sequence[ParallelResult]) -> Table:
    numbers = tuple(TITLES[case] for case in ParallelCase)
    table = _table("model", "trained by", numbers=("ranks", "micro-\nbatches", *numbers))
    for row in parallel_rows(results):
        style = "" if row.passes else "bold red"
        cells = [Text(cell.maximum, "" if cell.passes else "bold red") for cell in row.cells]
        table.add_row(row.model, Text(row.way, style), row.ranks, row.microbatches, *cells)
    return table


def _diffusion_table(result: DiffusionResult) -> Table:
    table = _table("model", "trained by", "verdict", numbers=("max |Δ|", "recognised"))
    for row in diffusion_rows(result):
        run = row.run
        verdict = _verdict(run.verdict, passes=run.verdict.passes)
        table.add_row(result.model, run.system, verdict, run.maximum, row.recognised)
    return table


def _table(*names: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _verdict(verdict: str, *, passes: bool) -> Text:
    return Text(verdict, style="green" if passes else "bold red")
