"""What keeps modules from local tensors, and the entries of a plan that change it.

An entry is named only after a plan with it has run in static mode, and only if neither forward nor
the whole step sends more bytes with it than without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from plan_api.api import installed, parallelize
from plan_api.inspect.track import Collective, Phase, Record, track
from plan_api.lowering.model_names import is_inside
from plan_api.plan import Plan
from plan_api.spec.path import generalize_numbers, path_code
from plan_api.spec.placements import placement_code
from plan_api.static.compare import gradients, kept
from plan_api.static.twin import twin_of

__all__ = ["hint"]

_MOST = 5  # operators that are named
_ROUNDS = 3  # an entry may show the next operator that needs one
_LOSS = ("aten._log_softmax", "aten.nll_loss")  # take sharded classes, and send a number per row
_OF_CLASSES = (*_LOSS, "aten.logsumexp")

_TO_LOSS = (
    "expected classes that stay sharded up to the loss: torch.nn.functional.cross_entropy takes "
    "them so, as with zoo.llama(loss_parallel=True), sends one number per row, and needs no entry"
)
_TO_MODEL = (
    "no entry avoids it without sending more: entries reach what modules are given and return, so "
    "move the operator into a module of its own, whose <in> an entry can place"
)


@dataclass(frozen=True)
class _Gather:
    """An entry by which a tensor is whole along an axis.

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
        """Adds it, as the line does."""
        path = f"{self.pattern}.{self.tensor}" if self.pattern else self.tensor
        plan.shard(path, Replicate(), self.axis)


def hint(
    plan: Plan,
    model: nn.Module,
    pattern: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
    works: Callable[[Plan], bool],
) -> str:
    """The operators in modules for which DTensor moves tensors, and what would avoid it.

    Args:
        plan: for Eager.
        model: unmodified.
        pattern: of the modules; "" for all.
        args: of the model.
        kwargs: of the model.
        use: as of `parallelize`.
        works: whether these modules run on local tensors under another plan.

    Returns:
        a line for each operator; then lines that can be pasted into the plan, or what else to do.
    """

    def step(asked: Plan) -> Record:
        return _step(asked, model, args, kwargs, use)

    record = step(plan)
    moved = [*_moved(record, pattern)]
    lines = [_description(record, one) for one in moved if not one.cause.startswith(_LOSS)]
    lines = [*dict.fromkeys(lines)][:_MOST]
    if any(one.cause.startswith(_OF_CLASSES) for one in moved):
        return "\n".join([*lines, _TO_LOSS])
    if not lines:
        return "no operator there makes DTensor move a tensor"
    entries = _entries(plan, pattern, record, step, works)
    if not entries:
        return "\n".join([*lines, _TO_MODEL])
    return "\n".join([*lines, "to run on local tensors, add:", *map(str, entries)])


def _step(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
) -> Record:
    """What Eager does under a plan, forward and backward."""
    eager = parallelize(twin_of(model), plan, src_data_rank=None, use=use)
    with track(eager) as record, kept(eager), torch.enable_grad():
        result = eager(*args, **kwargs)
        gradients(result, [param for param in eager.parameters() if param.requires_grad])
    installed(eager).remove()
    return record


def _moved(record: Record, pattern: str) -> Iterator[Collective]:
    """What operators in these modules send."""
    inside = rf"{pattern}(?:\.|$)" if pattern else ""
    for event in record.collectives:
        if event.cause.startswith("aten.") and re.match(inside, event.site or ""):
            yield event


def _description(record: Record, event: Collective) -> str:
    operator = next(
        (
            one
            for one in record.operators
            if (one.name, one.site, one.phase) == (event.cause, event.site, event.phase)
            and one.start <= event.start <= one.start + one.duration
        ),
        None,
    )
    placed = f" of {operator.before}" if operator is not None else ""
    return (
        f"{event.cause}{placed}, in {generalize_numbers(event.site or '') or 'the model'}, "
        f"{event.phase.value}: DTensor sends {event.name} along {event.axis!r} for it"
    )


def _entries(
    plan: Plan,
    pattern: str,
    record: Record,
    step: Callable[[Plan], Record],
    works: Callable[[Plan], bool],
) -> list[_Gather]:
    """Those with which the modules run on local tensors; none if more bytes are sent then."""
    before = _sent(record)
    found: list[_Gather] = []
    for _ in range(_ROUNDS):
        new = [one for one in _gathers(record, pattern) if one not in found]
        if not new:
            break
        found += dict.fromkeys(new)
        asked = plan | Plan(plan.mesh)
        for one in found:
            one.add_to(asked)
        worked = works(asked)
        try:
            record = step(asked)
        except (ValueError, RuntimeError, IndexError):  # as of a shape that its code says
            break
        if worked:
            more = any(now > then for now, then in zip(_sent(record), before, strict=True))
            return [] if more else found
    return []


def _gathers(record: Record, pattern: str) -> Iterator[_Gather]:
    """Before each operator that moves tensors in forward: backward follows it."""
    for event in _moved(record, pattern):
        if event.phase is Phase.BACKWARD:
            continue
        site = event.site or ""
        made = [
            one.site
            for one in record.operators
            if one.start < event.start and one.site and one.site != site
            if is_inside(one.site, site)
        ]
        path, tensor = (made[-1] or "", "<out>") if made else (site, "<in>")
        yield _Gather(generalize_numbers(path), tensor, event.axis)


def _sent(record: Record) -> tuple[int, int]:
    """Bytes of forward, and of all."""
    forward = [event.bytes for event in record.collectives if event.phase is Phase.FORWARD]
    return sum(forward), sum(event.bytes for event in record.collectives)
