"""The report as Markdown and as one HTML file that needs nothing else."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from integration.compare.results import SystemResult
from integration.report.environment import Environment
from integration.report.palette import DARK, LIGHT, styles
from integration.report.wording import PageText, Row, rows

_SMALL_NUMBER = re.compile(r"[\d.]+e-\d+")


@dataclass(frozen=True)
class Chart:
    """A figure: the bitmap ``figures/<name>.png``, and SVG for either background."""

    name: str
    alternative: str
    light_svg: bytes
    dark_svg: bytes

    def data_uri(self, *, dark: bool) -> str:
        """Return the figure as a ``data:`` address, which loads nothing."""
        encoded = base64.b64encode(self.dark_svg if dark else self.light_svg)
        return f"data:image/svg+xml;base64,{encoded.decode()}"


@dataclass(frozen=True)
class Page:
    """What both templates are filled from."""

    text: PageText
    results: Sequence[SystemResult]
    losses: Chart
    cost: Chart
    environment: Environment

    @property
    def rows(self) -> list[Row]:
        """A printable row per system."""
        return rows(self.results)

    @property
    def failed(self) -> list[SystemResult]:
        """The systems whose run gave no result."""
        return [result for result in self.results if result.failure is not None]

    def colour(self, system: str, *, dark: bool) -> str:
        """Return the colour that the figures give a system."""
        return styles(self.results, DARK if dark else LIGHT)[system].colour


def render_markdown(page: Page) -> str:
    """Return report.md; its figures are the files ``figures/*.png``."""
    return _render("report.md.j2", page, escape=False)


def render_html(page: Page) -> str:
    """Return report.html; everything is inside, in a light and a dark form."""
    return _render("report.html.j2", page, escape=True)


def _render(template: str, page: Page, *, escape: bool) -> str:
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
    """Keep numbers such as 1e-4 on one line: a browser may break after the hyphen."""
    return Markup(_SMALL_NUMBER.sub(r'<span class="whole">\g<0></span>', str(escape(text))))
