"""The short table that ends the command."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from integration.compare.results import SystemResult, passes
from integration.report.wording import TIMES, finding, rows


def print_results(results: Sequence[SystemResult], report: Path, console: Console) -> None:
    """Print a line per system, what was found, and where the report lies."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("system", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("max |Δ|", "step time", f"{TIMES} single", "tokens/s", "memory"):
        table.add_column(name, justify="right")
    for row in rows(results):
        table.add_row(
            row.system,
            Text(row.verdict, style="green" if row.verdict.passes else "bold red"),
            row.maximum,
            row.step_time,
            row.relative.removesuffix(TIMES),
            row.tokens_per_second,
            row.memory_mean,
        )
    console.print()
    console.print(table)
    console.print()
    good = passes(results)
    verdict = Text("passes: " if good else "DOES NOT PASS: ", "green" if good else "bold red")
    console.print(verdict + Text(finding(results)), soft_wrap=True)
    console.print(Text(f"report: {report}"), soft_wrap=True)
