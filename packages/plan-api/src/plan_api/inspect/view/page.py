"""The page: what the plan is for, the step's communication, and the tree of modules."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

from torch import nn

from plan_api.inspect.track import Record
from plan_api.inspect.view.colours import colour_of
from plan_api.inspect.view.html import Element, element
from plan_api.inspect.view.rows import heading, rows_of, size
from plan_api.inspect.view.tree import Branch, Traffic, tree_of
from plan_api.plan import Plan
from plan_api.spec.axes import axis_names

__all__ = ["view"]

# Nothing is fetched, whatever a name in the model says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def view(plan: Plan, model: nn.Module, path: str | Path, *, record: Record | None = None) -> Path:
    """Writes a plan on a model as one HTML file that needs nothing else, for any browser.

    It has the tree of modules, coloured by placement, with the moves and the lines of the plan, and
    modules that are alike shown once. A function and no method, as `diff`: a plan is what the user
    has written, and knows of no records.

    Args:
        plan: any.
        model: on any device, ``meta`` included, before `parallelize` or after; it is not changed.
        path: of the file; what is there is overwritten.
        record: of a step of this model; its communication is shown per module, summed upwards.

    Returns:
        the path.

    Raises:
        ValueError: the plan does not fit the model.
    """
    path = Path(path)
    path.write_text(_page(plan, model, tree_of(plan, model, record), record), encoding="utf-8")
    return path


def _page(plan: Plan, model: nn.Module, tree: Branch, record: Record | None) -> str:
    title = f"{type(model).__name__} on {_mesh(plan)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", Element(_file("page.css"))),
    )
    body = element(
        "body",
        element("h1", title),
        element("p", f"{len(plan.entries)} entries; {_parameters(tree)}."),
        _legend(tree),
        *([] if record is None else _communication(record, tree)),
        element("h2", "Modules"),
        _search(),
        element("div", _tree(plan, tree, record is not None), class_="scroll"),
        element("script", Element(_file("page.js"))),
    )  # fmt: skip
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _tree(plan: Plan, tree: Branch, recorded: bool) -> Element:
    number = len(plan.axes)
    columns = (
        f"--axes: repeat({number}, 7rem); --sent: {'8rem' if recorded else ' '}; "
        f"min-width: {66 + 8 * number}rem"  # below that it is scrolled
    )
    kind = "tree" if recorded else "tree unrecorded"
    return element("div", heading(plan.axes), *rows_of(tree, plan.axes), class_=kind, style=columns)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _mesh(plan: Plan) -> str:
    axes = zip(axis_names(plan.mesh), plan.mesh.shape, strict=True)
    return ", ".join(f"{name}={number}" for name, number in axes)


def _parameters(tree: Branch) -> str:
    states = list(tree.all_states)
    whole, here = sum(one.bytes for one in states), sum(one.local_bytes for one in states)
    return f"parameters and buffers are {size(whole)} in all, {size(here)} on this rank"


def _legend(tree: Branch) -> Element:
    used = sorted({one for state in tree.all_states for one in state.placements} | {"R", "P"})
    said = {"R": "whole on every rank", "P": "terms of a sum"}
    chips = [
        element(
            "span",
            element("span", one, class_="chip", style=f"background: {colour_of(one)}"),
            f" {said.get(one, f'cut along dim {one[2:-1]}' if one.startswith('S(') else '')}",
        )
        for one in used
    ]
    return element("div", *chips, class_="legend")


def _search() -> Element:
    return element(
        "div",
        element("button", "open all", id="open", type="button"),
        element("button", "close all", id="close", type="button"),
        element("input", id="find", type="search", placeholder="part of a name"),
        element("span", id="count", class_="soft"),
        class_="bar",
    )


def _communication(record: Record, tree: Branch) -> list[Element]:
    sent: Counter[tuple[str, ...]] = Counter()
    weight: Counter[tuple[str, ...]] = Counter()
    for one in record.collectives:
        what = (one.phase.value, one.name, one.axis or "another group", _why(one.cause))
        sent[what] += 1
        weight[what] += one.bytes
    rows = [
        element(
            "tr", *(element("td", cell) for cell in what),
            element("td", f"{number:,}", class_="number"),
            element("td", size(weight[what]), class_="number"),
        )
        for what, number in sent.items()
    ]  # fmt: skip
    whole = Traffic(sent.total(), weight.total())
    heads = ("phase", "collective", "axis", "because of")
    table = element(
        "table",
        element(
            "tr", *(element("th", one) for one in heads),
            *(element("th", one, class_="number") for one in ("number", "bytes")),
        ),
        *rows,
    )  # fmt: skip
    elsewhere = Traffic(whole.number - tree.total.number, whole.bytes - tree.total.bytes)
    told = f"{whole.number:,} collectives, {size(whole.bytes)} on rank {record.rank}"
    if elsewhere.number:
        told += (
            f"; {elsewhere.number:,} of them, {size(elsewhere.bytes)}, belong to no module, as "
            f"gradients of many parameters that are sent together"
        )
    return [element("h2", "Communication of the step"), element("p", f"{told}."), table]


def _why(cause: str) -> str:
    return "gradients" if cause.startswith("gradient") else cause or "other code"
