"""Plans the communication of a step as a person would write it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from plan_api.api import installed, parallelize
from plan_api.lowering.ir import Lowered
from plan_api.lowering.lower import lower
from plan_api.plan import Plan
from plan_api.spec.entry import Entry
from plan_api.static.generation.entries import GeneratedEntry, add_entries
from plan_api.static.generation.shared_redistributions import shared_redistributions
from plan_api.static.generation.tensor_uses import Place
from plan_api.static.generation.trace import EagerTrace, trace_eager_step
from plan_api.static.shadow_model import shadow_of

__all__ = ["planned_communication", "trace_plan"]

_MOST_STEPS = 8  # a redistribution changes how the gradients of earlier layers are placed


def planned_communication(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
) -> Plan:
    """Adds to a plan the redistributions that steps of Eager show; the plan is not changed.

    Args:
        plan: for Eager.
        model: unmodified.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        use: see `parallelize`.

    Returns:
        the plan itself if it has all of them.
    """
    added: dict[Place, GeneratedEntry] = {}
    superseded: set[Place] = set()
    original, planned = lower(plan, model), plan
    for _ in range(_MOST_STEPS):
        lowered, trace = trace_plan(planned, model, args, kwargs, use)
        found = shared_redistributions(lowered, trace)
        if not found:
            break
        for one in found:
            for user in one.users:
                added.pop(user, None)
            added[one.place] = one.entry
            superseded |= {*one.users, one.place}
        planned = Plan(plan.mesh, cover=plan.cover)
        planned._entries = [*_entries_without(plan, original, superseded)]
        number = len(planned._entries)
        add_entries(planned, added.values(), model)
        planned._entries[number:] = map(_of_changed_axes, planned._entries[number:])
    return planned


def trace_plan(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
) -> tuple[Lowered, EagerTrace]:
    """Runs a step of Eager under a plan; returns what it shows, and the plan, lowered."""
    eager = parallelize(shadow_of(model), plan, src_data_rank=None, use=use)
    lowered = installed(eager).lowered
    installed(eager).remove()
    return lowered, trace_eager_step(eager, lowered, plan.mesh, args, kwargs)


def _entries_without(plan: Plan, lowered: Lowered, places: Collection[Place]) -> Iterator[Entry]:
    """Yields the entries of a plan without what they do at these places."""
    for number, entry in enumerate(plan.entries):
        ops = [
            op
            for op in lowered.ops
            if op.entry.number == number and op.hook_point.is_module_hook and op.tensor[0] == "<"
        ]
        others = [op for op in ops if Place(op.path, op.hook_point, op.index) not in places]
        if len(others) == len(ops):
            yield entry
            continue
        for path in dict.fromkeys(op.path for op in others):
            tensor = entry.path.text[entry.path.text.rindex("<") :]
            pattern = re.escape(path)
            yield replace(
                entry, path=replace(entry.path, text=f"{pattern}.{tensor}", pattern=pattern)
            )


def _of_changed_axes(entry: Entry) -> Entry:
    """Leaves out the axes along which an entry changes nothing."""
    columns = (entry.axes, entry.src, entry.dst, entry.grad_src, entry.grad_dst)
    rows = zip(*(column or () for column in columns), strict=True)
    changed = [row for row in rows if row[1] != row[2] or row[3] != row[4]]
    axes, src, dst, grad_src, grad_dst = zip(*changed, strict=True)
    return replace(
        entry, axes=axes, src=src, dst=dst, grad_src=grad_src, grad_dst=grad_dst,
        line=f"added for {entry.line}" if "added for" not in entry.line else entry.line,
    )  # fmt: skip
