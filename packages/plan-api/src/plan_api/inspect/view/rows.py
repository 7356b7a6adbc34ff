"""The rows of the tree: modules, and in them moves, parameters and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from plan_api.inspect.view.colours import colour_of
from plan_api.inspect.view.html import Element, element
from plan_api.inspect.view.tree import Branch, Move, State, Traffic

__all__ = ["heading", "rows_of", "size"]

_OPEN = 2  # so many levels are open at first
_NOT_SENT = element("span", class_="sent")


def heading(axes: Sequence[str]) -> Element:
    """The names of the columns."""
    return element(
        "div",
        element("span", "module, tensor", class_="name"),
        *(element("span", f"along {axis}") for axis in axes),
        element("span", "shape, here"),
        element("span", "bytes here", class_="number"),
        element("span", "sent in a step", class_="number sent"),
        element("span", "line of the plan"),
        class_="row head",
    )


def rows_of(branch: Branch, axes: Sequence[str], depth: int = 0) -> Iterator[Element]:
    """A branch as rows that can be folded.

    Args:
        branch: any.
        axes: of the mesh.
        depth: of it in the tree.
    """
    inner = [_move(one, depth + 1) for one in branch.moves]
    inner += [_state(one, branch, depth + 1) for one in branch.states]
    for child in branch.children:
        inner += rows_of(child, axes, depth + 1)
    row = _module(branch, axes, depth)
    yield element(
        "details", element("summary", *row, class_="row"), *inner, open=depth < _OPEN,
        data_name=branch.paths[0], **_alike(branch),
    )  # fmt: skip


def size(number: int) -> str:
    """Bytes in the unit in which they have one to three digits before the point."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:,.0f} B" if unit == "B" else f"{amount:,.1f} {unit}"


def _alike(branch: Branch) -> dict[str, str]:
    """So that the search finds those that are not shown."""
    if len(branch.paths) == 1:
        return {}
    above, _, first = branch.paths[0].rpartition(".")
    prefix = f"{above.rpartition('.')[2]}." if above else ""
    last = branch.paths[-1].rpartition(".")[2]
    return {"data_in": prefix, "data_first": first, "data_last": last}


def _module(branch: Branch, axes: Sequence[str], depth: int) -> list[Element]:
    states, alike = list(branch.all_states), len(branch.paths)
    first = branch.paths[0].rpartition(".")[2]
    last = branch.paths[-1].rpartition(".")[2]
    named = [element("b", f"{first} … {last}" if alike > 1 else first or branch.kind)]
    if alike > 1:
        named.append(element("span", f"{alike} alike", class_="times"))
    if first:
        named.append(element("span", branch.kind, class_="soft"))
    here = alike * sum(one.local_bytes for one in states)
    sent = [element("span", _sent(branch.total.times(alike)))]
    if alike > 1 and branch.total.number:
        sent.append(element("span", f"each {_sent(branch.total)}", class_="soft each"))
    return [
        element("span", *_spaced(named), class_="name", style=f"--depth: {depth}"),
        *(_shares(states, at, axis) for at, axis in enumerate(axes)),
        element("span", _number(len(states), alike), class_="soft"),
        element("span", size(here) if states else "", class_="number"),
        element("span", *sent, class_="number sent"),
        element("span"),
    ]


def _spaced(parts: Sequence[str]) -> Iterator[str]:
    for at, part in enumerate(parts):
        yield from (" ", part) if at else (part,)


def _number(tensors: int, alike: int) -> str:
    if not tensors:
        return ""
    each = "1 tensor" if tensors == 1 else f"{tensors:,} tensors"
    return each if alike == 1 else f"{alike} times {each}"


def _shares(states: Sequence[State], axis: int, name: str) -> Element:
    """How much of a module is placed how along an axis, by the bytes of the whole tensors."""
    parts: Counter[str] = Counter()
    for one in states:
        parts[one.placements[axis]] += one.bytes
    whole = parts.total()
    if not whole:
        return element("span")
    told = ", ".join(f"{placed} {100 * part / whole:.0f}%" for placed, part in parts.most_common())
    spans = [
        element("span", style=f"background: {colour_of(placed)}; flex: {part}")
        for placed, part in sorted(parts.items())
        if part
    ]
    return element("span", *spans, class_="shares", title=f"{name}: {told}")


def _state(state: State, branch: Branch, depth: int) -> Element:
    kind = "buffer " if state.is_buffer else ""
    shapes = _shape(state.shape)
    if state.local_shape != state.shape:
        shapes += f" → {_shape(state.local_shape)}"
    tied = f" = {state.tied_to}" if state.tied_to else ""
    return _leaf(
        f"{branch.paths[0]}.{state.name}".lstrip("."),
        element("code", state.name),
        element("span", f" {kind}{state.dtype}{tied}", class_="soft"),
        cells=[element("span", _chip(one)) for one in state.placements],
        rest=[
            element("span", shapes, class_="mono"),
            element("span", "" if state.tied_to else size(state.local_bytes), class_="number"),
            _NOT_SENT,
            _lines(state.lines),
        ],
        depth=depth,
    )


def _move(move: Move, depth: int) -> Element:
    cells = [
        element("span", *([_chip(before), " "] if before else []), "→ ", _chip(after))
        if after
        else element("span")
        for before, after in zip(move.before, move.after, strict=True)
    ]
    return _leaf(
        "",
        element("code", move.tensor),
        element("span", f" {move.kind}", class_="soft"),
        cells=cells,
        rest=[element("span"), element("span"), _NOT_SENT, _lines(move.lines)],
        depth=depth,
    )


def _leaf(
    full: str, *named: Element, cells: Sequence[Element], rest: Sequence[Element], depth: int
) -> Element:
    name = element("span", *named, class_="name", style=f"--depth: {depth}")
    return element("div", name, *cells, *rest, class_="row leaf", data_name=full or False)


def _chip(placed: str) -> Element:
    return element("span", placed, class_="chip", style=f"background: {colour_of(placed)}")


def _lines(lines: Sequence[str]) -> Element:
    return element("span", ", ".join(lines), class_="mono soft")


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _sent(traffic: Traffic) -> str:
    return f"{traffic.number:,} · {size(traffic.bytes)}" if traffic.number else ""
