"""The elements that an SVG picture is made of."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ragged_shard.ownership import Ownership
from ragged_shard.picture.captions import colour

CHARACTER = 6.7  # pixels: about the width of one, at the font's size of 12
RIGHT = 'text-anchor="end"'
STYLE = (
    "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.note{fill:#555}.index{fill:#666;font-size:11px}"
    ".column{font-weight:bold}.in{text-anchor:middle;dominant-baseline:central}"
    ".light{fill:#fff}</style>"
)
PATTERNS = (
    '<defs><pattern id="copies" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V7" stroke="#000" stroke-opacity=".3" '
    'stroke-width="2.4"/></pattern>'
    '<pattern id="terms" width="7" height="7" patternUnits="userSpaceOnUse">'
    '<circle cx="2" cy="2" r="1.3" fill-opacity=".45"/></pattern></defs>'
)


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """The attributes of a rectangle."""
    return f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'


def text(x: float, y: float, words: str, kind: str = "", attributes: str = "") -> str:
    """Characters, of one of the classes in `STYLE`."""
    kind = f' class="{kind}"' if kind else ""
    attributes = f" {attributes}" if attributes else ""
    return f'<text x="{number(x)}" y="{number(y)}"{kind}{attributes}>{escape(words)}</text>'


def number(value: float) -> str:
    """Pixels, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def swatch(part: int, ownership: Ownership, where: str) -> Iterator[str]:
    """A rectangle in a part's colour, and the pattern over it."""
    yield f'<rect {where} fill="{colour(part)}"/>'
    if len(ownership.parts[part].ranks) > 1:
        yield f'<rect {where} fill="url(#{_pattern(ownership)})"/>'


def _pattern(ownership: Ownership) -> str:
    partial = any(placement.is_partial() for placement in ownership.placements)
    return "terms" if partial else "copies"
