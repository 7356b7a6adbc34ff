"""Explains what a plan does to a model, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import HookPoint, Lowered, OpKind, Override, SiteStep
from plan_api.lowering.lower import lower
from plan_api.lowering.model_names import is_inside, named_state
from plan_api.lowering.overlap import Overlap, check_overlaps, find_overlaps
from plan_api.runtime.local_shards import local_shape
from plan_api.spec.entry import Entry
from plan_api.spec.placements import format_placement
from plan_api.spec.plan_entries import PlanEntries
from plan_api.spec.policies import VALUES

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Diff", "Explanation", "ExplanationRow", "diff", "explain", "print_explanation"]


@dataclass(frozen=True)
class ExplanationRow:
    """One tensor at one site, or how one module runs.

    Attributes:
        site: the path of the module.
        hook: the phase of a parameter, or the hook; `fully_shard`, `recompute`, `compile`,
            `precision` or `overlap`.
        tensor: its name there, with the number or name of the argument; empty for a module; of
            `precision` an input that ranks quantize before they gather it.
        before: the placement along each axis before the hook; empty where the plan does not say it.
        after: the placement along each axis after the hook; for a module the axes and options, the
            policy, the backend or the recipe; for `overlap` the communication of forward and the
            products beside it, or why there are none.
        gradient: the placements of its gradient along each axis, before and after the hook, where
            the plan says them; ? for one that it does not say; for `overlap` that of backward.
        bytes: the size of a parameter or buffer on this rank after the hook; empty for activations,
            whose size is known at run time.
        line: where the entry was written.
    """

    site: str
    hook: str
    tensor: str
    before: str
    after: str
    gradient: str
    bytes: str
    line: str


@dataclass(frozen=True)
class Explanation:
    """A plan on a model; `str` returns a table as text, and `table` one for rich.

    Attributes:
        rows: one for each entry and what it resolves to.
        overrides: entries that a later entry replaces.
    """

    rows: tuple[ExplanationRow, ...]
    overrides: tuple[Override, ...]

    def __str__(self) -> str:
        cells = [
            [field.name for field in fields(ExplanationRow)],
            *(list(astuple(row)) for row in self.rows),
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, *map(str, self.overrides)])

    def table(self) -> Table:
        """Returns a `rich.table.Table`.

        Raises:
            ImportError: rich is not installed (`pip install plan-api[report]`).
        """
        from rich.table import Table

        table = Table(
            *(field.name for field in fields(ExplanationRow)), caption=_caption(self.overrides)
        )
        for row in self.rows:
            table.add_row(*astuple(row))
        return table


@dataclass(frozen=True)
class Diff:
    """The entries by which two plans differ, wherever they were written.

    Attributes:
        removed: entries that only the first plan has.
        added: entries that only the second plan has.
    """

    removed: tuple[Entry, ...]
    added: tuple[Entry, ...]

    def __str__(self) -> str:
        return "\n".join(
            [*(f"- {entry}" for entry in self.removed), *(f"+ {entry}" for entry in self.added)]
        )


def explain(plan: PlanEntries, model: nn.Module, *, overlap: str | None = None) -> Explanation:
    """Lists what a plan does to each tensor of a model, in the order of its modules.

    Args:
        plan: any plan.
        model: on any device, ``meta`` included; it is not changed.
        overlap: as in `parallelize`: adds a row for each site that communicates along this axis,
            with the Linears whose products are computed meanwhile.

    Raises:
        ValueError: the plan does not fit the model, or nothing overlaps along the axis.
    """
    lowered = lower(plan, model, mode="static")  # which takes what Eager takes, and more
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    order = {name: number for number, name in enumerate(names)}
    hook_points = list(HookPoint)
    state = dict(named_state(model))
    sites = sorted(
        lowered.sites, key=lambda site: (order[site.path], hook_points.index(site.hook_point))
    )
    rows = []
    for site in sites:
        for step in site.steps:
            name = f"{site.path}.{step.tensor}" if site.path else step.tensor
            shown = step.tensor if site.hook_point.is_phase else f"{step.tensor}:{step.index}"
            size = ""
            if step.kind is OpKind.SHARD:
                placements = lowered.schedules[name].at(site.hook_point)
                local = local_shape(state[name], plan.mesh, placements)
                size = str(local.numel() * state[name].element_size())
            lines = dict.fromkeys(plan.entries[number].line for number in step.entries)
            rows.append(
                ExplanationRow(
                    site.path, site.hook_point.value, shown, _placements(step, plan, "src"),
                    _placements(step, plan, "dst"), _gradient(step, plan), size, ", ".join(lines),
                )
            )  # fmt: skip
    rows += _fully_sharded_rows(lowered)
    rows += _policy_rows(lowered)
    if overlap is not None:
        overlaps = find_overlaps(lowered, model, plan.mesh, overlap)
        check_overlaps(overlaps, lowered, plan.mesh, overlap)
        rows += [_overlap_row(one, plan.mesh.device_type) for one in overlaps]
    rows.sort(key=lambda row: order[row.site])  # of a module, its policies last
    return Explanation(tuple(rows), lowered.overrides)


def _fully_sharded_rows(lowered: Lowered) -> Iterator[ExplanationRow]:
    """Yields a row for each module that fully_shard is applied to, with its options."""
    of_modules: dict[str, Counter[str]] = {path: Counter() for path in lowered.fully_sharded}
    for name, values in lowered.shard_values.items():
        inside = [path for path in of_modules if is_inside(name, path)]
        of_modules[max(inside, key=len)][str(values)] += 1
    for path, entry in lowered.fully_sharded.items():
        options = [
            f"{name}={value}"
            for name, value in entry.options
            if name not in VALUES and value is not None
        ]
        counted = [f"{text} ({count} parameters)" for text, count in of_modules[path].items()]
        shown = ", ".join([f"over {' x '.join(entry.axes)}", *options, *counted])
        yield ExplanationRow(path, "fully_shard", "", "", shown, "", "", entry.line)


def _policy_rows(lowered: Lowered) -> Iterator[ExplanationRow]:
    """Yields a row for each module that is recomputed, compiled or in low precision."""
    for hook, policies in (
        ("recompute", lowered.recomputed),
        ("compile", lowered.compiled),
        ("precision", lowered.precisions),
    ):
        for path, policy in policies.items():
            yield ExplanationRow(path, hook, "", "", str(policy.value), "", "", policy.line)
    for one in lowered.quantized_gathers:
        layers = ", ".join(name.removeprefix(one.path).lstrip(".") or name for name in one.layers)
        yield ExplanationRow(
            one.path, "precision", f"<in>:{one.index}", f"{one.axis}=S({one.dim})",
            f"gathered in {one.recipe} for {layers}", "", "", ", ".join(one.lines),
        )  # fmt: skip


# The operators of `plan_api.ops.overlap.fused`. Only ranks find out whether they have such memory.
_FUSED = {
    "all-gather": "fused_all_gather_matmul",
    "reduce-scatter": "fused_matmul_reduce_scatter",
}


def _overlap_row(overlap: Overlap, device_type: str) -> ExplanationRow:
    """Returns the row of a site that communicates along the axis of ``overlap``."""
    tensor = f"{overlap.step.tensor}:{overlap.step.index}"
    linears = ", ".join(
        name.removeprefix(overlap.path).lstrip(".") or name for name in overlap.linears
    )

    def sent(collective: str) -> str:
        fused = _FUSED.get(collective) if device_type == "cuda" else None
        return f"{collective} ({fused} if ranks have symmetric memory)" if fused else collective

    forward = backward = ""
    if overlap.reason:
        forward = f"not overlapped: {overlap.reason}"
    elif overlap.is_input:
        forward = f"{sent(overlap.forward)} beside {linears}" if overlap.forward else ""
        backward = f"{sent(overlap.backward)} beside the gradients of the weights of {linears}"
    else:
        forward = f"{sent(overlap.forward)} beside {linears}"
        backward = f"{sent(overlap.backward)} beside the gradient of {linears}"
        backward *= bool(overlap.backward)
    return ExplanationRow(
        overlap.path, "overlap", tensor, "", forward, backward, "", ", ".join(overlap.step.lines)
    )


def print_explanation(explanation: Explanation) -> None:
    """Prints an explanation: as a table of rich if it is installed, otherwise as text."""
    if find_spec("rich"):
        from rich.console import Console

        console, table = Console(), explanation.table()
        if not console.is_terminal:  # a file or a pipe has no width, and rich takes 80 columns
            unlimited = console.options.update(max_width=1_000_000)
            table_width = console.measure(table, options=unlimited).maximum
            console.width = max(console.width, table_width)
        console.print(table)
    else:
        print(explanation)


def diff(plan_a: PlanEntries, plan_b: PlanEntries) -> Diff:
    """Returns the entries that only one of two plans has, in their orders."""
    return Diff(
        tuple(entry for entry in plan_a.entries if entry not in plan_b.entries),
        tuple(entry for entry in plan_b.entries if entry not in plan_a.entries),
    )


def _placements(step: SiteStep, plan: PlanEntries, end: str) -> str:
    shown = [
        f"{axis}={format_placement(placement)}"
        for axis in plan.axes
        if axis in step.moves and (placement := getattr(step.moves[axis], end)) is not None
    ]
    if end == "dst":
        options = [f"{name}={v}" for move in step.moves.values() for name, v in move.options]
        shown += dict.fromkeys(options)  # an entry on several axes has them once
    return ", ".join(shown)


def _gradient(step: SiteStep, plan: PlanEntries) -> str:
    moves = [(axis, step.moves[axis]) for axis in plan.axes if axis in step.moves]
    return ", ".join(
        f"{axis}={_format(move.grad_src)}->{_format(move.grad_dst)}"
        for axis, move in moves
        if move.grad_src is not None or move.grad_dst is not None
    )


def _format(placement: Placement | None) -> str:
    return "?" if placement is None else format_placement(placement)


def _caption(overrides: tuple[Override, ...]) -> str | None:
    return "\n".join(map(str, overrides)) or None
