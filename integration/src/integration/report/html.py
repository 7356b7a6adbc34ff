"""Renders a report as one self-contained HTML page, with its figures in a light and a dark form."""

import base64
import re
from importlib.resources import files

import jinja2
from markupsafe import Markup, escape

from integration.report.figures import svg_of
from integration.report.palette import DARK, LIGHT, style_of
from integration.report.section import Figure, ReportPage, anchor

_SMALL_NUMBER = re.compile(r"[\d.]+e-\d+")
_CODE = re.compile(r"`([^`]+)`")


def render_html(report: ReportPage) -> str:
    """Returns the contents of the page: verdicts, a contents list, and the sections."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "anchor": anchor,
        "kind": lambda content: type(content).__name__,
        "text": _text,
        "image": _image,
        "colour": lambda series, theme: style_of(series, theme).colour,
    }
    source = (files(__package__) / "report.html.j2").read_text()
    return environment.from_string(source).render(report=report, light=LIGHT, dark=DARK)


def _text(text: str) -> Markup:
    """Returns text with its code, and without line breaks in numbers such as 1e-4."""
    escaped = _CODE.sub(r"<code>\g<1></code>", str(escape(text)))
    return Markup(_SMALL_NUMBER.sub(r'<span class="whole">\g<0></span>', escaped))


def _image(figure: Figure, *, dark: bool) -> str:
    """Returns a figure as the address of an image that contains it."""
    encoded = base64.b64encode(svg_of(figure.draw(DARK if dark else LIGHT)))
    return f"data:image/svg+xml;base64,{encoded.decode()}"
