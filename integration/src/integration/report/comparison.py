"""Writes the report of a comparison: report.md, report.html, results.json and the figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from integration.compare.parallelism import ParallelResult
from integration.compare.random_numbers import RandomResult
from integration.compare.results import (
    RESULTS_FILE,
    DiffusionResult,
    OptimizerResult,
    Results,
    SystemResult,
    by_model,
    write_results,
)
from integration.compare.setup import Comparison
from integration.loc.table import loc_section
from integration.report.case_figure import draw_cases
from integration.report.cost_figure import draw_cost
from integration.report.diffusion_figure import draw_diffusion
from integration.report.diffusion_text import diffusion_text
from integration.report.environment import describe_environment
from integration.report.figures import save_png, svg_of
from integration.report.loss_figure import draw_losses
from integration.report.optimizer_figure import draw_optimizers
from integration.report.optimizer_text import optimizer_text
from integration.report.page_text import page_text
from integration.report.pages import (
    Chart,
    DiffusionSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RandomSection,
    ReportPage,
    render_html,
    render_markdown,
)
from integration.report.palette import DARK, LIGHT, Theme
from integration.report.parallel_figure import draw_parallelism
from integration.report.parallel_text import parallel_text
from integration.report.random_figure import draw_random
from integration.report.random_text import random_text
from integration.report.system_rows import styles

__all__ = ["write_report"]


def write_report(comparison: Comparison, results: Results, arguments: Sequence[str]) -> Path:
    """Writes every file of the report into the comparison's folder.

    Args:
        comparison: the comparison, whose ``out`` exists.
        results: its results.
        arguments: the command line.

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
        "lines_of_code": [asdict(each) for each in loc_section().efforts],
    }
    write_results(out / RESULTS_FILE, results, about)
    figures = out / "figures"
    figures.mkdir(exist_ok=True)
    page = ReportPage(
        text=text,
        results=results,
        models=_model_sections(results.systems, figures),
        random=_random_section(results.random_numbers, figures),
        optimizers=_optimizer_section(results.optimizers, figures),
        parallelism=_parallel_section(results.parallelism, figures),
        diffusion=_diffusion_section(results.diffusion, figures),
        lines=loc_section(),
        environment=environment,
    )
    (out / "report.md").write_text(render_markdown(page))
    html = out / "report.html"
    html.write_text(render_html(page))
    return html


def _model_sections(results: Sequence[SystemResult], figures: Path) -> list[ModelSection]:
    def section(model: str, same: Sequence[SystemResult]) -> ModelSection:
        return ModelSection(
            model,
            same,
            losses=_chart(
                f"losses-{model}",
                f"Loss of {model} by step under every system, and its difference from one device",
                lambda theme: draw_losses(same, theme, styles(results, theme)),
                figures,
            ),
            cost=_chart(
                f"cost-{model}",
                f"Step time, memory and collectives of {model} under every system",
                lambda theme: draw_cost(same, theme, styles(results, theme)),
                figures,
            ),
        )

    return [section(model, same) for model, same in by_model(results).items()]


def _random_section(results: Sequence[RandomResult], figures: Path) -> RandomSection | None:
    if not results:
        return None
    chart = _chart(
        "random",
        "Difference from the single device by step, for random init and for dropout",
        lambda theme: draw_random(results, theme),
        figures,
    )
    return RandomSection(random_text(results), results, chart)


def _optimizer_section(
    results: Sequence[OptimizerResult], figures: Path
) -> OptimizerSection | None:
    if not results:
        return None
    chart = _chart(
        "optimizers",
        "Loss by step with each optimizer under DDP and under fsdp, and their difference",
        lambda theme: draw_optimizers(results, theme),
        figures,
    )
    return OptimizerSection(optimizer_text(results), results, chart)


def _parallel_section(results: Sequence[ParallelResult], figures: Path) -> ParallelSection | None:
    if not results:
        return None
    chart = _chart(
        "parallelism",
        "Largest difference from one device of every variant, a column per model",
        lambda theme: draw_parallelism(results, theme),
        figures,
    )
    curves = _chart(
        "cases",
        "Difference from one device by step of every variant, in the three cases of random numbers",
        lambda theme: draw_cases(results, theme),
        figures,
    )
    return ParallelSection(parallel_text(results), results, chart, curves)


def _diffusion_section(result: DiffusionResult | None, figures: Path) -> DiffusionSection | None:
    if result is None:
        return None
    chart = _chart(
        "diffusion",
        "Real images, and digits that each run generates from the same noise; losses by step",
        lambda theme: draw_diffusion(result, theme),
        figures,
    )
    return DiffusionSection(diffusion_text(result), result, chart)


def _chart(name: str, alternative: str, draw: Callable[[Theme], Figure], folder: Path) -> Chart:
    light, dark = draw(LIGHT), draw(DARK)
    save_png(light, folder / f"{name}.png")
    return Chart(name, alternative, light_svg=svg_of(light), dark_svg=svg_of(dark))
