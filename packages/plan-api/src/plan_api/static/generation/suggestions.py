"""Explains which operators keep modules on DTensors, and suggests entries that avoid it.

An entry is suggested only after a plan with it has run in static mode, and only if neither forward
nor the full step sends more bytes with it than without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate

from plan_api.inspect.track import CollectiveEvent, Record, StepPhase, track
from plan_api.installation import installed
from plan_api.lowering.model_names import is_inside
from plan_api.plan import Plan
from plan_api.spec.path import generalize_numbers, path_code
from plan_api.spec.placements import placement_code
from plan_api.static.comparison import loss_gradients, preserved_state
from plan_api.static.generation.example_step import ExampleStep

__all__ = ["suggest_entries"]

_MOST_OPERATORS = 5
_ROUNDS = 3  # an entry may reveal the next operator that needs one
# They take sharded classes, and send one number per row.
_LOSSES = ("aten._log_softmax", "aten.nll_loss")
_OVER_CLASSES = (*_LOSSES, "aten.logsumexp")

_SHARDED_LOSS = (
    "expected classes that stay sharded up to the loss: torch.nn.functional.cross_entropy takes "
    "them so, as with zoo.llama(loss_parallel=True), sends one number per row, and needs no entry"
)
_OWN_MODULE = (
    "no entry avoids it without sending more: entries place inputs and outputs of modules, so move "
    "the operator into a module of its own, whose <in> an entry can place"
)


@dataclass(frozen=True)
class _ReplicateEntry:
    """An entry that replicates a tensor along an axis.

    Attributes:
        pattern: of the modules.
        tensor: ``<in>`` or ``<out>``.
        axis: of the mesh.
    """

    pattern: str
    tensor: str
    axis: str

    def __str__(self) -> str:
        path = path_code(self.pattern, self.tensor)
        return f'plan.shard({path}, {placement_code(Replicate())}, "{self.axis}")'

    def add_to(self, plan: Plan) -> None:
        """Adds the entry, as its text does."""
        path = f"{self.pattern}.{self.tensor}" if self.pattern else self.tensor
        plan.shard(path, Replicate(), self.axis)


def suggest_entries(
    plan: Plan,
    step: ExampleStep,
    pattern: str,
    runs_locally: Callable[[Plan], bool],
) -> str:
    """Returns the operators for which DTensor redistributes tensors, and what would avoid it.

    Args:
        plan: for Eager.
        step: to run.
        pattern: of the modules; "" for all.
        runs_locally: whether these modules run on local tensors under another plan.

    Returns:
        a line for each operator; then lines that can be pasted into the plan, or another remedy.
    """
    record = _record_step(plan, step)
    events = [*_operator_collectives(record, pattern)]
    lines = [_description(record, event) for event in events if not event.cause.startswith(_LOSSES)]
    lines = [*dict.fromkeys(lines)][:_MOST_OPERATORS]
    if any(event.cause.startswith(_OVER_CLASSES) for event in events):
        return "\n".join([*lines, _SHARDED_LOSS])
    if not lines:
        return "DTensor redistributes no tensor for an operator there"
    entries = _working_entries(plan, step, pattern, record, runs_locally)
    if not entries:
        return "\n".join([*lines, _OWN_MODULE])
    return "\n".join([*lines, "to run on local tensors, add:", *map(str, entries)])


def _record_step(plan: Plan, step: ExampleStep) -> Record:
    """Records a step of Eager under a plan, forward and backward."""
    eager = step.parallelized(plan)
    with track(eager) as record, preserved_state(eager), torch.enable_grad():
        result = eager(*step.args, **step.kwargs)
        loss_gradients(result, [param for param in eager.parameters() if param.requires_grad])
    installed(eager).remove()
    return record


def _operator_collectives(record: Record, pattern: str) -> Iterator[CollectiveEvent]:
    """Returns the collectives that operators in these modules cause."""
    inside = rf"{pattern}(?:\.|$)" if pattern else ""
    for event in record.collectives:
        if event.cause.startswith("aten.") and re.match(inside, event.site or ""):
            yield event


def _description(record: Record, event: CollectiveEvent) -> str:
    operator = next(
        (
            operator
            for operator in record.operators
            if (operator.name, operator.site, operator.phase)
            == (event.cause, event.site, event.phase)
            and operator.start <= event.start <= operator.start + operator.duration
        ),
        None,
    )
    placements = f" of {operator.before}" if operator is not None else ""
    return (
        f"{event.cause}{placements}, in {generalize_numbers(event.site or '') or 'the model'}, "
        f"{event.phase.value}: DTensor sends {event.name} along {event.axis!r} for it"
    )


def _working_entries(
    plan: Plan,
    step: ExampleStep,
    pattern: str,
    record: Record,
    runs_locally: Callable[[Plan], bool],
) -> list[_ReplicateEntry]:
    """Returns entries with which the modules run on local tensors; none if more bytes are sent."""
    before = _bytes_sent(record)
    entries: list[_ReplicateEntry] = []
    for _ in range(_ROUNDS):
        new = [candidate for candidate in _candidates(record, pattern) if candidate not in entries]
        if not new:
            break
        entries += dict.fromkeys(new)
        changed = plan | Plan(plan.mesh)
        for entry in entries:
            entry.add_to(changed)
        works = runs_locally(changed)
        try:
            record = _record_step(changed, step)
        except (ValueError, RuntimeError, IndexError):  # such as a shape that the code expects
            break
        if works:
            sends_more = any(
                now > then for now, then in zip(_bytes_sent(record), before, strict=True)
            )
            return [] if sends_more else entries
    return []


def _candidates(record: Record, pattern: str) -> Iterator[_ReplicateEntry]:
    """Replicates the tensor before each operator that redistributes in forward.

    Backward follows forward, so its operators need no entry of their own.
    """
    for event in _operator_collectives(record, pattern):
        if event.phase is StepPhase.BACKWARD:
            continue
        site = event.site or ""
        producers = [
            operator.site
            for operator in record.operators
            if operator.start < event.start and operator.site and operator.site != site
            if is_inside(operator.site, site)
        ]
        path, tensor = (producers[-1] or "", "<out>") if producers else (site, "<in>")
        yield _ReplicateEntry(generalize_numbers(path), tensor, event.axis)


def _bytes_sent(record: Record) -> tuple[int, int]:
    """Returns the bytes of forward, and of the full step."""
    forward = [event.bytes for event in record.collectives if event.phase is StepPhase.FORWARD]
    return sum(forward), sum(event.bytes for event in record.collectives)
