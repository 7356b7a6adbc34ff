"""The rows of the tree: modules, and in them steps of the plan, parameters and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from plan_api.inspect.view.html import Element, element, placement_colour
from plan_api.inspect.view.tree import Communication, ModuleNode, ShownStep, ShownTensor

__all__ = ["format_bytes", "header_row", "tree_rows"]

_OPEN_LEVELS = 2
_NO_COMMUNICATION = element("span", class_="sent")


def header_row(axes: Sequence[str]) -> Element:
    """Returns the row of column names."""
    return element(
        "div",
        element("span", "module, tensor", class_="name"),
        *(element("span", f"along {axis}") for axis in axes),
        element("span", "shape, local"),
        element("span", "local bytes", class_="number"),
        element("span", "sent in a step", class_="number sent"),
        element("span", "line of the plan"),
        class_="row head",
    )


def tree_rows(node: ModuleNode, axes: Sequence[str], depth: int = 0) -> Iterator[Element]:
    """Returns a node as rows that can be folded.

    Args:
        node: of the tree.
        axes: of the mesh.
        depth: of the node in the tree.
    """
    inner = [_step_row(step, depth + 1) for step in node.steps]
    inner += [_tensor_row(tensor, node, depth + 1) for tensor in node.tensors]
    for child in node.children:
        inner += tree_rows(child, axes, depth + 1)
    cells = _module_cells(node, axes, depth)
    yield element(
        "details", element("summary", *cells, class_="row"), *inner, open=depth < _OPEN_LEVELS,
        data_name=node.paths[0], **_search_data(node),
    )  # fmt: skip


def format_bytes(number: int) -> str:
    """Formats bytes in the unit in which they have one to three digits before the point."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:,.0f} B" if unit == "B" else f"{amount:,.1f} {unit}"


def _search_data(node: ModuleNode) -> dict[str, str]:
    """Returns attributes by which the search finds the modules that are not shown."""
    if len(node.paths) == 1:
        return {}
    parent, _, first = node.paths[0].rpartition(".")
    prefix = f"{parent.rpartition('.')[2]}." if parent else ""
    last = node.paths[-1].rpartition(".")[2]
    return {"data_in": prefix, "data_first": first, "data_last": last}


def _module_cells(node: ModuleNode, axes: Sequence[str], depth: int) -> list[Element]:
    tensors, count = list(node.all_tensors), len(node.paths)
    first = node.paths[0].rpartition(".")[2]
    last = node.paths[-1].rpartition(".")[2]
    named = [element("b", f"{first} … {last}" if count > 1 else first or node.kind)]
    if count > 1:
        named.append(element("span", f"{count} equal", class_="times"))
    if first:
        named.append(element("span", node.kind, class_="soft"))
    local = count * sum(tensor.local_bytes for tensor in tensors)
    sent = [element("span", _format_communication(node.total.times(count)))]
    if count > 1 and node.total.number:
        sent.append(
            element("span", f"each {_format_communication(node.total)}", class_="soft each")
        )
    return [
        element("span", *_spaced(named), class_="name", style=f"--depth: {depth}"),
        *(_shares(tensors, at, axis) for at, axis in enumerate(axes)),
        element("span", _tensor_count(len(tensors), count), class_="soft"),
        element("span", format_bytes(local) if tensors else "", class_="number"),
        element("span", *sent, class_="number sent"),
        element("span"),
    ]


def _spaced(parts: Sequence[str]) -> Iterator[str]:
    for at, part in enumerate(parts):
        yield from (" ", part) if at else (part,)


def _tensor_count(tensors: int, modules: int) -> str:
    if not tensors:
        return ""
    each = "1 tensor" if tensors == 1 else f"{tensors:,} tensors"
    return each if modules == 1 else f"{modules} times {each}"


def _shares(tensors: Sequence[ShownTensor], axis: int, name: str) -> Element:
    """Draws the placements of a module's tensors along an axis, by their global bytes."""
    parts: Counter[str] = Counter()
    for tensor in tensors:
        parts[tensor.placements[axis]] += tensor.bytes
    total = parts.total()
    if not total:
        return element("span")
    percentages = ", ".join(
        f"{placement} {100 * part / total:.0f}%" for placement, part in parts.most_common()
    )
    spans = [
        element("span", style=f"background: {placement_colour(placement)}; flex: {part}")
        for placement, part in sorted(parts.items())
        if part
    ]
    text = f"{name}: {percentages}"
    return element("span", *spans, class_="shares", title=text, role="img", aria_label=text)


def _tensor_row(tensor: ShownTensor, node: ModuleNode, depth: int) -> Element:
    kind = "buffer " if tensor.is_buffer else ""
    shapes = _shape(tensor.shape)
    if tensor.local_shape != tensor.shape:
        shapes += f" → {_shape(tensor.local_shape)}"
    tied = f" = {tensor.tied_to}" if tensor.tied_to else ""
    return _row(
        f"{node.paths[0]}.{tensor.name}".lstrip("."),
        element("code", tensor.name),
        element("span", f" {kind}{tensor.dtype}{tied}", class_="soft"),
        cells=[element("span", _chip(placement)) for placement in tensor.placements],
        rest=[
            element("span", shapes, class_="mono"),
            element(
                "span", "" if tensor.tied_to else format_bytes(tensor.local_bytes), class_="number"
            ),
            _NO_COMMUNICATION,
            _lines(tensor.lines),
        ],
        depth=depth,
    )


def _step_row(step: ShownStep, depth: int) -> Element:
    cells = [
        element("span", *([_chip(before), " "] if before else []), "→ ", _chip(after))
        if after
        else element("span")
        for before, after in zip(step.before, step.after, strict=True)
    ]
    return _row(
        "",
        element("code", step.tensor),
        element("span", f" {step.kind}", class_="soft"),
        cells=cells,
        rest=[element("span"), element("span"), _NO_COMMUNICATION, _lines(step.lines)],
        depth=depth,
    )


def _row(
    full: str, *named: Element, cells: Sequence[Element], rest: Sequence[Element], depth: int
) -> Element:
    name = element("span", *named, class_="name", style=f"--depth: {depth}")
    return element("div", name, *cells, *rest, class_="row leaf", data_name=full or False)


def _chip(placement: str) -> Element:
    return element(
        "span", placement, class_="chip", style=f"background: {placement_colour(placement)}"
    )


def _lines(lines: Sequence[str]) -> Element:
    return element("span", ", ".join(lines), class_="mono soft")


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _format_communication(communication: Communication) -> str:
    return (
        f"{communication.number:,} · {format_bytes(communication.bytes)}"
        if communication.number
        else ""
    )
