"""The contents of a report, which terminal.py, markdown.py and html.py render.

A report has sections; a section has verdicts, paragraphs, tables, figures and commands.
Nothing here is specific to an experiment or to an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from matplotlib.figure import Figure as MatplotlibFigure

from integration.report.palette import Theme

__all__ = [
    "Cell", "Column", "Command", "Content", "Figure", "Paragraph", "Report", "Section", "Table",
    "VerdictRow",
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
    """

    text: str
    passes: bool | None = None
    series: str | None = None


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
        columns: its columns.
        rows: a cell per column; text stands for a cell without marks.
        title: heading above it on the terminal and, if not empty, on the page.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    title: str = ""


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


Content: TypeAlias = Paragraph | Table | Figure | Command


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
class Report:
    """A report; its table of verdicts and its contents list are made from the sections.

    Attributes:
        title: its heading.
        sections: its sections, in order.
    """

    title: str
    sections: tuple[Section, ...]

    @property
    def verdicts(self) -> tuple[VerdictRow, ...]:
        """The verdicts of all sections, in order."""
        return tuple(verdict for section in self.sections for verdict in section.verdicts)

    @property
    def passes(self) -> bool:
        """Whether no verdict failed."""
        return all(verdict.passes is not False for verdict in self.verdicts)
