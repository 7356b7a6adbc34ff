"""Plans the communication of a step as a person would write it."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from plan_api.lowering.ir import Lowered
from plan_api.lowering.lower import lower
from plan_api.lowering.model_names import is_inside
from plan_api.plan import Plan
from plan_api.spec.entry import Entry, EntryKind
from plan_api.static.generation.entries import GeneratedEntry, add_entries, split_policies
from plan_api.static.generation.example_step import ExampleStep
from plan_api.static.generation.shared_redistributions import (
    ADDED_FOR,
    SharedRedistribution,
    shared_redistributions,
)
from plan_api.static.generation.tensor_uses import Place

__all__ = ["plan_communication", "planned_communication"]

_log = logging.getLogger("plan_api")

_MOVES = (EntryKind.SHARD, EntryKind.REDISTRIBUTE)
_MOST_STEPS = 16  # a redistribution changes how the gradients of earlier modules are placed


def plan_communication(
    plan: Plan,
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    fake: bool = True,
    use: Sequence[str] | None = None,
) -> Plan:
    """Adds to a plan the redistributions that a person would write, by running steps of Eager.

    In Eager, a plan that only shards weights communicates more than by hand: DTensor scatters
    Partial tensors for an operator and gathers them for the next one, and each of several modules
    that take one tensor gathers it, and has its gradient reduced. The plan that is returned has
    entries for

    - the reduction of a Partial output, where it arises;
    - the reduction of a gradient that becomes Partial, once for all modules that share the tensor,
      as by Megatron-LM's ``f`` (Shoeybi et al., arXiv 1909.08053, figure 3);
    - one gather of an input that several modules gather, instead of their own.

    `Plan.explain` shows them with the lines of the plan that ask for them. They are placed at the
    input of the innermost module around those that share a tensor, or else at the output that it
    comes from. A tensor that other modules or functions take as well is reduced at each module.
    `generate_static` does the same by itself, so that both modes have the same collectives.

    Args:
        plan: for Eager; it is not changed. Its entries of `Plan.fully_shard`, `Plan.recompute` and
            `Plan.compile` stay in it, and do not apply to the steps.
        model: unmodified; it is not changed.
        example_inputs: of one step, as a tuple of arguments or a dict of keyword arguments; the
            same on all ranks of the mesh.
        fake: whether to run on FakeTensors, which take no memory, and to send nothing; model and
            inputs may be on ``meta``. Models whose code depends on values, such as a loop over the
            experts that tokens chose, need ``fake=False``.
        use: the optional packages to use while it runs; see `parallelize`, whose patches it
            installs.

    Returns:
        a plan for `parallelize`; the same object if it has all of these entries.

    Raises:
        ValueError: the plan does not fit the model, or the model does not take these inputs.
    """
    step = ExampleStep.checked("plan_communication", plan, model, example_inputs, fake, use)
    placed, policies = split_policies(plan)
    planned = planned_communication(placed, step)
    return plan if planned is placed else planned | policies


def planned_communication(plan: Plan, step: ExampleStep) -> Plan:
    """Does what `plan_communication` does.

    Args:
        plan: for Eager, without fully_shard.
        step: to run.
    """
    added: dict[Place, GeneratedEntry] = {}
    replaced: set[Place] = set()  # what the plan's entries do there, added ones do
    original, planned = lower(plan, step.model), plan
    for _ in range(_MOST_STEPS):
        lowered, trace = step.trace(planned)
        found = shared_redistributions(lowered, trace)
        if not found:
            break
        alike = (
            of_layer for one in found for of_layer in _in_layers_alike(one, lowered, step.model)
        )
        for one in (*alike, *found):  # what a layer asks for itself last
            for user in one.users:
                added.pop(user, None)
            added[one.place] = one.entry
            replaced |= {*one.users, one.place}
        planned = Plan(plan.mesh, cover=plan.cover)
        planned._entries = [*_entries_without(plan, original, replaced)]
        number = len(planned._entries)
        add_entries(planned, added.values(), step.model)
        planned._entries[number:] = map(_of_changed_axes, planned._entries[number:])
    else:
        _log.warning(
            "plan_communication: each of %d steps of Eager has added entries, and a further one "
            "may; call it again with the plan that it has returned", _MOST_STEPS,
        )  # fmt: skip
    return planned


def _in_layers_alike(
    one: SharedRedistribution, lowered: Lowered, model: nn.Module
) -> Iterator[SharedRedistribution]:
    """Yields a redistribution for the other layers in which the plan writes the same.

    They would ask for it themselves, but later: a gradient that is reduced in a layer leaves it
    otherwise, which a step shows layer by layer.
    """
    path, kinds = one.place.path, {name: type(module) for name, module in model.named_modules()}
    for number in re.finditer(r"(?<![^.])\d+(?![^.])", path):
        layer = path[: number.end()]
        written = _written_in(layer, lowered)
        of_layer = re.compile(rf"{re.escape(path[: number.start()])}\d+$")
        for other in filter(of_layer.match, kinds):
            place = _in_layer(layer, other, one.place)
            is_alike = written and _written_in(other, lowered) == written
            if other != layer and is_alike and kinds.get(place.path) is kinds[path]:
                users = frozenset(_in_layer(layer, other, user) for user in one.users)
                yield SharedRedistribution(place, replace(one.entry, path=place.path), users)


def _in_layer(layer: str, other: str, place: Place) -> Place:
    """Returns a place's like in another layer; one of no layer is itself."""
    if not is_inside(place.path, layer):
        return place
    return replace(place, path=f"{other}{place.path.removeprefix(layer)}")


def _written_in(layer: str, lowered: Lowered) -> set[tuple[object, ...]]:
    """Returns the lines of the plan that place a layer's parameters and tensors, and which."""
    params = {
        (name.removeprefix(layer), line)
        for name, schedule in lowered.schedules.items()
        if is_inside(name, layer)
        for line in schedule.lines
    }
    tensors = {
        (site.path.removeprefix(layer), site.hook_point, step.index, line)
        for site in lowered.sites
        if is_inside(site.path, layer)
        for step in site.steps
        for line in step.lines
    }
    return params | tensors


def _entries_without(plan: Plan, lowered: Lowered, places: Collection[Place]) -> Iterator[Entry]:
    """Yields the entries of a plan without what they do at these places."""
    for number, entry in enumerate(plan.entries):
        ops = [
            op
            for op in lowered.ops
            if op.entry.number == number and op.hook_point.is_module_hook and entry.kind in _MOVES
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
        line=f"{ADDED_FOR}{entry.line}",
    )  # fmt: skip
