"""Prints the tables of a report in short at the end of a command."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from integration.report.section import Cell, ReportPage, Table

# The longest text of a column that is not broken into lines.
_LONGEST_LINE = 24


def print_report(report: ReportPage, path: Path, console: Console) -> None:
    """Prints the tables of every section, then the verdicts, where the reader looks first.

    Args:
        report: the report.
        path: the file to name in the last line.
        console: output.
    """
    console.print()
    for section in report.sections:
        for content in section.contents:
            if isinstance(content, Table):
                print_table(replace(content, title=content.title or section.title), console)
    if report.verdict_table is not None:
        print_table(report.verdict_table, console)
        verdict = (
            Text("passes: ", "green") if report.passes else Text("DOES NOT PASS: ", "bold red")
        )
        findings = " ".join(each.finding for each in report.verdicts if each.finding)
        console.print(verdict + Text(findings), soft_wrap=True)
    console.print(Text(f"report: {path}"), soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Prints the columns of a table that have a heading on the terminal; none: prints nothing."""
    shown = [place for place, each in enumerate(table.columns) if each.terminal is not None]
    if not shown:
        return
    if table.title:
        console.print(Text(table.title, "bold"))
    printed = RichTable(box=None, pad_edge=False, header_style="bold")
    cells_of = table.cells
    for place in shown:
        column = table.columns[place]
        longest = max((len(cells[place].text) for cells in cells_of), default=0)
        is_short = longest <= _LONGEST_LINE
        printed.add_column(
            column.terminal or "",
            justify="right" if column.is_number else "left",
            no_wrap=not column.is_number and is_short,
            min_width=longest if column.is_number and is_short else None,  # headings break instead
        )
    for cells in cells_of:
        printed.add_row(*(_text(cells[place]) for place in shown))
    console.print(printed)
    console.print()


def _text(cell: Cell) -> Text:
    if cell.passes is None:
        return Text(cell.text)
    return Text(cell.text, "green" if cell.passes else "bold red")
