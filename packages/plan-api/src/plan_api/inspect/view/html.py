"""HTML elements, whose text is escaped, and the colours of placements."""

from __future__ import annotations

from html import escape

__all__ = ["DIM_COLOURS", "Element", "element", "placement_colour"]

_EMPTY = ("input", "meta")  # elements without content

# Okabe and Ito's palette, which the colour-blind can tell apart; dark text is readable on all.
_REPLICATE, _PARTIAL, _OTHER = "#D6DADF", "#E8743B", "#4FC3A1"
DIM_COLOURS = ("#56B4E9", "#E69F00", "#F0E442", "#CC79A7")  # of Shard(0), Shard(1) and so on


class Element(str):
    """Text that is HTML, and is not escaped."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str | bool) -> Element:
    """Returns an element with content; `input` and `meta` have none.

    Args:
        tag: its name.
        content: elements, and text, which is escaped.
        attributes: by name, with ``_`` for ``-`` and a trailing ``_`` removed; True: without a
            value, False: left out.
    """
    formatted = []
    for name, value in attributes.items():
        html_name = name.rstrip("_").replace("_", "-")
        if value is True:
            formatted.append(f" {html_name}")
        elif value is not False:
            formatted.append(f' {html_name}="{escape(value)}"')
    if tag in _EMPTY:
        return Element(f"<{tag}{''.join(formatted)}>")
    inner = "".join(one if isinstance(one, Element) else escape(one) for one in content)
    return Element(f"<{tag}{''.join(formatted)}>{inner}</{tag}>")


def placement_colour(placement: str) -> str:
    """Returns the colour of a placement as formatted by `plan_api.lowering.ir.short`."""
    if placement == "R":
        return _REPLICATE
    if placement == "P" or placement.startswith("P("):
        return _PARTIAL
    dim = placement.removeprefix("S(").removesuffix(")")
    return DIM_COLOURS[int(dim) % len(DIM_COLOURS)] if dim.isdecimal() else _OTHER
