"""Writes the page: the mesh, the communication of a step, and the tree of modules."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

from torch import nn

from plan_api.inspect.track import Record
from plan_api.inspect.view.html import Element, element, placement_colour
from plan_api.inspect.view.rows import format_bytes, header_row, tree_rows
from plan_api.inspect.view.tree import Communication, ModuleNode, build_tree
from plan_api.plan import Plan
from plan_api.spec.axes import axis_names

__all__ = ["view"]

# The page fetches nothing, even if a name in the model contains HTML.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def view(plan: Plan, model: nn.Module, path: str | Path, *, record: Record | None = None) -> Path:
    """Writes a plan on a model as one self-contained HTML file, for any browser.

    It shows the tree of modules, coloured by placement, with redistributions and the lines of the
    plan; equal neighbouring modules are shown once.

    Args:
        plan: any plan.
        model: on any device, ``meta`` included, before `parallelize` or after; it is not changed.
        path: of the file, which is overwritten.
        record: of a step of this model; its communication is shown per module, children included.

    Returns:
        the path.

    Raises:
        ValueError: the plan does not fit the model.
    """
    path = Path(path)
    path.write_text(_page(plan, model, build_tree(plan, model, record), record), encoding="utf-8")
    return path


def _page(plan: Plan, model: nn.Module, tree: ModuleNode, record: Record | None) -> str:
    title = f"{type(model).__name__} on {_mesh(plan)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", Element(_file("page.css"))),
    )
    main = element(
        "main",
        element("h1", title),
        element("p", f"{len(plan.entries)} entries; {_parameters(tree)}."),
        _legend(tree),
        *([] if record is None else _communication(record, tree)),
        element("h2", "Modules"),
        _search(),
        # A region that scrolls is reached by Tab, so that arrows scroll it.
        element(
            "div", _tree(plan, tree, record is not None),
            class_="scroll", role="region", aria_label="Modules", tabindex="0",
        ),
    )  # fmt: skip
    body = element("body", main, element("script", Element(_file("page.js"))))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _tree(plan: Plan, tree: ModuleNode, recorded: bool) -> Element:
    number = len(plan.axes)
    columns = (
        f"--axes: repeat({number}, 7rem); --sent: {'8rem' if recorded else ' '}; "
        f"--number: {number}; --sent-printed: {'minmax(0, 3fr)' if recorded else ' '}; "
        f"min-width: {66 + 8 * number}rem"  # narrower windows scroll
    )
    kind = "tree" if recorded else "tree unrecorded"
    return element(
        "div", header_row(plan.axes), *tree_rows(tree, plan.axes), class_=kind, style=columns
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _mesh(plan: Plan) -> str:
    axes = zip(axis_names(plan.mesh), plan.mesh.shape, strict=True)
    return ", ".join(f"{name}={number}" for name, number in axes)


def _parameters(tree: ModuleNode) -> str:
    tensors = list(tree.all_tensors)
    total = format_bytes(sum(tensor.bytes for tensor in tensors))
    local = format_bytes(sum(tensor.local_bytes for tensor in tensors))
    return f"parameters and buffers are {total} in all, {local} on this rank"


def _legend(tree: ModuleNode) -> Element:
    used = sorted(
        {placement for tensor in tree.all_tensors for placement in tensor.placements} | {"R", "P"}
    )
    meanings = {"R": "replicated", "P": "partial"}
    meanings |= {one: f"sharded along dim {one[2:-1]}" for one in used if one.startswith("S(")}
    chips = [
        element(
            "span",
            element("span", one, class_="chip", style=f"background: {placement_colour(one)}"),
            f" {meanings.get(one, '')}",
        )
        for one in used
    ]
    return element("div", *chips, class_="legend")


def _search() -> Element:
    return element(
        "div",
        element("button", "open all", id="open", type="button"),
        element("button", "close all", id="close", type="button"),
        element(
            "input",
            id="find",
            type="search",
            placeholder="part of a name",
            aria_label="find modules and tensors by a part of their names",
        ),
        element("span", id="count", class_="soft", role="status"),
        class_="bar",
        role="search",
    )


def _communication(record: Record, tree: ModuleNode) -> list[Element]:
    counts: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    for one in record.collectives:
        what = (one.phase.value, one.name, one.axis or "another group", _cause(one.cause))
        counts[what] += 1
        sizes[what] += one.bytes
    rows = [
        element(
            "tr", *(element("td", cell) for cell in what),
            element("td", f"{number:,}", class_="number"),
            element("td", format_bytes(sizes[what]), class_="number"),
        )
        for what, number in counts.items()
    ]  # fmt: skip
    total = Communication(counts.total(), sizes.total())
    heads = ("phase", "collective", "axis", "cause")
    table = element(
        "table",
        element(
            "tr", *(element("th", head, scope="col") for head in heads),
            *(element("th", one, class_="number", scope="col") for one in ("number", "bytes")),
        ),
        *rows,
    )  # fmt: skip
    outside = Communication(total.number - tree.total.number, total.bytes - tree.total.bytes)
    summary = f"{total.number:,} collectives, {format_bytes(total.bytes)} on rank {record.rank}"
    if outside.number:
        summary += (
            f"; {outside.number:,} of them, {format_bytes(outside.bytes)}, belong to no module, "
            f"such as reductions of a bucket of gradients"
        )
    return [element("h2", "Communication of the step"), element("p", f"{summary}."), table]


def _cause(cause: str) -> str:
    return "gradients" if cause.startswith("gradient") else cause or "other code"
