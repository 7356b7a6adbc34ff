"""The contents of a report, which terminal.py, markdown.py and html.py render.

A report has sections; a section has verdicts, paragraphs, tables, figures and commands.
Nothing here is specific to an experiment or to an output. Text between backticks is code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from matplotlib.figure import Figure as MatplotlibFigure

from integration.report.formatting import ABSENT
from integration.report.palette import Theme

__all__ = [
    "Cell", "Column", "Command", "Content", "Figure", "LogExcerpt", "Paragraph", "ReportPage",
    "Section", "Table", "VerdictRow", "anchor",
]  # fmt: skip


@dataclass(frozen=True)
class VerdictRow:
    """A row of the table of verdicts, with which a report begins.

    Attributes:
        subject: what was compared, such as "llama-10m under 11 systems".
        passes: None if the comparison has no verdict.
        largest: the largest difference that was found, formatted, with what it is of; empty if
            nothing was compared.
        tolerance: the largest accepted difference, formatted; empty without one.
        finding: a sentence on the result; with failures, what failed and where its log is.
    """

    subject: str
    passes: bool | None
    largest: str = ""
    tolerance: str = ""
    finding: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: its contents.
        passes: whether it is marked as passed or failed; None: not marked.
        series: the system or source whose colour is shown beside it; None: none.
        link: the title of the section that it links to; empty: none.
    """

    text: str
    passes: bool | None = None
    series: str | None = None
    link: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        is_number: whether it is aligned to the right.
        terminal: its heading on the terminal, where columns are narrow; None: it is left out there.
    """

    title: str
    is_number: bool = False
    terminal: str | None = None


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; notes are set smaller, below what they explain."""

    text: str
    is_note: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: its columns; without any title it has no row of headings.
        rows: a cell per column; text stands for a cell without marks.
        title: its heading, if not empty.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    title: str = ""

    @property
    def cells(self) -> list[list[Cell]]:
        """The cells of its rows."""
        return [[Cell(c) if isinstance(c, str) else c for c in row] for row in self.rows]

    @property
    def has_headings(self) -> bool:
        """Whether any column has a title."""
        return any(column.title for column in self.columns)


@dataclass(frozen=True)
class Figure:
    """A figure, drawn once per theme.

    Attributes:
        name: name of its file, ``figures/<name>.png``.
        description: the text for readers who do not see it.
        draw: returns the figure in the colours of a theme.
    """

    name: str
    description: str
    draw: Callable[[Theme], MatplotlibFigure]


@dataclass(frozen=True)
class Command:
    """A shell command that the reader can copy."""

    text: str


@dataclass(frozen=True)
class LogExcerpt:
    """Lines of a log."""

    text: str


Content: TypeAlias = Paragraph | Table | Figure | Command | LogExcerpt


@dataclass(frozen=True)
class Section:
    """A section of a report.

    Attributes:
        title: its heading, unique in the report.
        contents: what it consists of, in order.
        verdicts: its rows in the table of verdicts.
    """

    title: str
    contents: tuple[Content, ...]
    verdicts: tuple[VerdictRow, ...] = ()


@dataclass(frozen=True)
class ReportPage:
    """A report; its table of verdicts and its contents list are made from the sections.

    Attributes:
        title: its heading.
        sections: its sections, in order.
        subject: a paragraph below the heading on what was compared or computed; empty: none.
        date: when it was made; empty if that does not matter.
    """

    title: str
    sections: tuple[Section, ...]
    subject: str = ""
    date: str = ""

    @property
    def verdicts(self) -> tuple[VerdictRow, ...]:
        """The verdicts of all sections, in order."""
        return tuple(verdict for section in self.sections for verdict in section.verdicts)

    @property
    def passes(self) -> bool:
        """Whether no verdict failed."""
        return all(verdict.passes is not False for verdict in self.verdicts)

    @property
    def verdict_table(self) -> Table | None:
        """The table of the verdicts, whose rows link to their sections; None without verdicts."""
        columns = (
            Column("compared", terminal="compared"),
            Column("verdict", terminal="verdict"),
            Column("largest difference", terminal="largest difference"),
            Column("tolerance", terminal="tolerance"),
            Column("finding"),
        )
        rows = tuple(
            _verdict_cells(section, row) for section in self.sections for row in section.verdicts
        )
        return Table(columns, rows) if rows else None


def anchor(title: str) -> str:
    """Returns the fragment of the address of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _verdict_cells(section: Section, row: VerdictRow) -> tuple[Cell, ...]:
    verdict = {True: "passes", False: "does not pass", None: ABSENT}[row.passes]
    return (
        Cell(row.subject, link=section.title),
        Cell(verdict, passes=row.passes),
        Cell(row.largest or ABSENT),
        Cell(row.tolerance or ABSENT),
        Cell(row.finding),
    )
