"""Renders the report as Markdown and as one self-contained HTML file."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from integration.compare.parallel_jobs import ParallelCase
from integration.compare.parallelism import ParallelResult
from integration.compare.random_jobs import Source
from integration.compare.random_numbers import RandomResult
from integration.compare.results import DiffusionResult, OptimizerResult, Results, SystemResult
from integration.loc.table import LocSection
from integration.report.diffusion_text import DiffusionRow, DiffusionText, diffusion_rows
from integration.report.environment import Environment
from integration.report.formatting import ABSENT, loss_unit
from integration.report.optimizer_text import OptimizerRow, OptimizerText, optimizer_rows
from integration.report.page_text import PageText
from integration.report.palette import DARK, LIGHT
from integration.report.parallel_text import TITLES, ParallelRow, ParallelText, parallel_rows
from integration.report.random_figure import source_colour
from integration.report.random_text import RandomRow, RandomText, random_rows
from integration.report.system_rows import SystemRow, rows, styles

_SMALL_NUMBER = re.compile(r"[\d.]+e-\d+")


@dataclass(frozen=True)
class Chart:
    """A figure: the file ``figures/<name>.png``, and SVG for light and dark backgrounds."""

    name: str
    alternative: str
    light_svg: bytes
    dark_svg: bytes

    def data_uri(self, *, dark: bool) -> str:
        """Returns the figure as a ``data:`` URI."""
        encoded = base64.b64encode(self.dark_svg if dark else self.light_svg)
        return f"data:image/svg+xml;base64,{encoded.decode()}"


@dataclass(frozen=True)
class ModelSection:
    """The contents of the two sections on systems for one model."""

    model: str
    results: Sequence[SystemResult]
    losses: Chart
    cost: Chart

    @property
    def unit(self) -> str:
        """The unit of its loss."""
        return loss_unit(self.model)

    @property
    def rows(self) -> list[SystemRow]:
        """A row per system."""
        return rows(self.results)


@dataclass(frozen=True)
class RandomSection:
    """The section on random numbers."""

    text: RandomText
    results: Sequence[RandomResult]
    chart: Chart

    @property
    def rows(self) -> list[RandomRow]:
        """A row per run."""
        return random_rows(self.results)


@dataclass(frozen=True)
class OptimizerSection:
    """The section on optimizers."""

    text: OptimizerText
    results: Sequence[OptimizerResult]
    chart: Chart

    @property
    def rows(self) -> list[OptimizerRow]:
        """A row per run."""
        return optimizer_rows(self.results)

    def colour(self, system: str, *, dark: bool) -> str:
        """Returns the colour that the figure gives a system."""
        return styles(self.results[0].runs, DARK if dark else LIGHT)[system].colour


@dataclass(frozen=True)
class ParallelSection:
    """The section on kinds of parallelism."""

    text: ParallelText
    results: Sequence[ParallelResult]
    chart: Chart
    curves: Chart

    @property
    def cases(self) -> list[str]:
        """The titles of the cells of a row."""
        return [TITLES[case] for case in ParallelCase]

    @property
    def rows(self) -> list[ParallelRow]:
        """A row per model and variant."""
        return parallel_rows(self.results)


@dataclass(frozen=True)
class DiffusionSection:
    """The section on diffusion."""

    text: DiffusionText
    result: DiffusionResult
    chart: Chart

    @property
    def rows(self) -> list[DiffusionRow]:
        """A row per run."""
        return diffusion_rows(self.result)

    def colour(self, system: str, *, dark: bool) -> str:
        """Returns the colour that the figure gives a system."""
        return styles(self.result.runs, DARK if dark else LIGHT)[system].colour


@dataclass(frozen=True)
class ReportPage:
    """The values of both templates; sections that the options left out are None."""

    text: PageText
    results: Results
    models: Sequence[ModelSection]
    random: RandomSection | None
    optimizers: OptimizerSection | None
    parallelism: ParallelSection | None
    diffusion: DiffusionSection | None
    lines: LocSection
    environment: Environment

    def colour(self, system: str, *, dark: bool) -> str:
        """Returns the colour that the figures give a system."""
        return styles(self.results.systems, DARK if dark else LIGHT)[system].colour

    def source_colour(self, source: str, *, dark: bool) -> str:
        """Returns the colour of a source of random numbers, or of the reference for `ABSENT`."""
        theme = DARK if dark else LIGHT
        return theme.reference if source == ABSENT else source_colour(Source(source), theme)


def render_markdown(page: ReportPage) -> str:
    """Returns the content of report.md, whose figures are the files ``figures/*.png``."""
    return _render("report.md.j2", page, escape=False)


def render_html(page: ReportPage) -> str:
    """Returns the content of report.html, with its figures in a light and a dark form."""
    return _render("comparison.html.j2", page, escape=True)


def _render(template: str, page: ReportPage, *, escape: bool) -> str:
    source = (files(__package__) / template).read_text()
    environment = jinja2.Environment(
        autoescape=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["unbroken"] = _unbroken
    return environment.from_string(source).render(page=page)


def _unbroken(text: str) -> Markup:
    """Prevents line breaks within numbers such as 1e-4, which a browser may break at the hyphen."""
    return Markup(_SMALL_NUMBER.sub(r'<span class="whole">\g<0></span>', str(escape(text))))
