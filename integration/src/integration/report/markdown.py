"""Renders a report as Markdown, whose figures are the files ``figures/*.png``."""

from collections.abc import Iterator

from integration.report.section import (
    Cell,
    Command,
    Content,
    Figure,
    LogExcerpt,
    Paragraph,
    ReportPage,
    Table,
    anchor,
)


def render_markdown(report: ReportPage) -> str:
    """Returns the contents of the file: verdicts, a contents list, and the sections."""
    return "\n\n".join(_blocks(report)) + "\n"


def _blocks(report: ReportPage) -> Iterator[str]:
    yield f"# {report.title}"
    if report.date:
        yield report.date
    if report.verdict_table is not None:
        yield "**Passes.**" if report.passes else "**Does not pass.**"
        yield render_table(report.verdict_table)
    if report.subject:
        yield report.subject
    yield "\n".join(f"- {_link(each.title, each.title)}" for each in report.sections)
    for section in report.sections:
        yield f"## {section.title}"
        for content in section.contents:
            yield from _content(content)


def _content(content: Content) -> Iterator[str]:
    match content:
        case Paragraph():
            yield content.text
        case Table():
            if content.title:
                yield f"### {content.title}"
            yield render_table(content)
        case Figure():
            yield f"![{content.description}](figures/{content.name}.png)"
        case Command():
            yield f"```sh\n{content.text}\n```"
        case LogExcerpt():
            yield f"```text\n{content.text}\n```"


def render_table(table: Table) -> str:
    """Returns a table without its title."""
    rules = ("---:" if column.is_number else "---" for column in table.columns)
    lines = [
        _row(column.title for column in table.columns),
        f"|{'|'.join(rules)}|",
        *(_row(map(_cell, cells)) for cells in table.cells),
    ]
    return "\n".join(lines)


def _row(texts: Iterator[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _cell(cell: Cell) -> str:
    text = cell.text.replace("\n", " ")
    return _link(text, cell.link) if cell.link else text


def _link(text: str, title: str) -> str:
    return f"[{text}](#{anchor(title)})"
