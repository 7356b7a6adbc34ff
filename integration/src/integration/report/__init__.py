"""Writes what a comparison found: report.md, report.html, results.json and the figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from integration.compare.results import RESULTS_FILE, SystemResult, write_results
from integration.compare.setup import Comparison
from integration.report.cost_figure import draw_cost
from integration.report.environment import describe_environment
from integration.report.figures import save_png, svg_of
from integration.report.loss_figure import draw_losses
from integration.report.pages import Chart, Page, render_html, render_markdown
from integration.report.palette import DARK, LIGHT, Theme
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
    text = page_text(comparison, results)
    about = {
        "finding": text.finding,
        "options": asdict(comparison.options),
        "environment": asdict(environment),
    }
    write_results(out / RESULTS_FILE, results, about)
    figures = out / "figures"
    figures.mkdir(exist_ok=True)
    page = Page(
        text=text,
        results=results,
        losses=_chart(
            "losses",
            "Loss of every system by step, and its difference from the single device",
            draw_losses,
            results,
            figures,
        ),
        cost=_chart("cost", "Step time and memory of every system", draw_cost, results, figures),
        environment=environment,
    )
    (out / "report.md").write_text(render_markdown(page))
    html = out / "report.html"
    html.write_text(render_html(page))
    return html


def _chart(
    name: str,
    alternative: str,
    draw: Callable[[Sequence[SystemResult], Theme], Figure],
    results: Sequence[SystemResult],
    folder: Path,
) -> Chart:
    light, dark = draw(results, LIGHT), draw(results, DARK)
    save_png(light, folder / f"{name}.png")
    return Chart(name, alternative, light_svg=svg_of(light), dark_svg=svg_of(dark))
