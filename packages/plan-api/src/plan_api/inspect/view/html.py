"""Elements of HTML, whose text is escaped unless it is an element."""

from __future__ import annotations

from html import escape

__all__ = ["Element", "element"]


_EMPTY = ("input", "meta")


class Element(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str | bool) -> Element:
    """An element with content; `input` and `meta` have none.

    Args:
        tag: its name.
        content: elements, and text, which is escaped.
        attributes: by name, ``_`` for ``-`` and one at the end left out; True: without a value,
            False: not there.
    """
    given = []
    for name, value in attributes.items():
        written = name.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {written}")
        elif value is not False:
            given.append(f' {written}="{escape(value)}"')
    if tag in _EMPTY:
        return Element(f"<{tag}{''.join(given)}>")
    inner = "".join(one if isinstance(one, Element) else escape(one) for one in content)
    return Element(f"<{tag}{''.join(given)}>{inner}</{tag}>")
