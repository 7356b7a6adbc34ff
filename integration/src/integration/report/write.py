"""Writes a report: report.md, report.html and the figures."""

from pathlib import Path

from integration.report.figures import save_png
from integration.report.html import render_html
from integration.report.markdown import render_markdown
from integration.report.palette import LIGHT
from integration.report.section import Figure, ReportPage


def write_report(report: ReportPage, out: Path) -> Path:
    """Writes the files of a report into ``out``, which exists.

    Returns:
        The path of report.html.
    """
    (out / "report.md").write_text(render_markdown(report))
    write_figures(report, out)
    html = out / "report.html"
    html.write_text(render_html(report))
    return html


def write_figures(report: ReportPage, out: Path) -> None:
    """Writes ``figures/*.png``."""
    (out / "figures").mkdir(exist_ok=True)
    for section in report.sections:
        for content in section.contents:
            if isinstance(content, Figure):
                save_png(content.draw(LIGHT), out / "figures" / f"{content.name}.png")
