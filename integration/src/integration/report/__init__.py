"""Writes what a comparison found: report.md, report.html, results.json and the figures."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from integration.compare.results import RESULTS_FILE, SystemResult, write_results
from integration.compare.setup import Comparison
from integration.report.environment import describe_environment
from integration.report.figures import Theme, draw_cost, draw_losses, save_png, save_svg
from integration.report.pages import Chart, render_html, render_markdown
from integration.report.wording import page_text

__all__ = ["write_report"]


def write_report(
    comparison: Comparison, results: Sequence[SystemResult], arguments: Sequence[str]
) -> Path:
    """Write every file of the report into the comparison's folder.

    Args:
        comparison: what was asked for; its ``out`` exists.
        results: the reference's first.
        arguments: the command line as it was given.

    Returns:
        The path of report.html.
    """
    out = comparison.options.out
    environment = describe_environment(comparison, arguments)
    about = {"environment": asdict(environment), "options": asdict(comparison.options)}
    write_results(out / RESULTS_FILE, results, about)
    (out / "figures").mkdir(exist_ok=True)
    charts = []
    for name, draw in (("losses", draw_losses), ("cost", draw_cost)):
        light, dark = draw(results, Theme.light()), draw(results, Theme.dark())
        save_png(light, out / "figures" / f"{name}.png")
        charts.append(Chart(name=name, light_svg=save_svg(light), dark_svg=save_svg(dark)))
    text = page_text(comparison, results)
    (out / "report.md").write_text(render_markdown(text, results, charts, environment))
    html = out / "report.html"
    html.write_text(render_html(text, results, charts, environment))
    return html
