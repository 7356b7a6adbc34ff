"""Which modules stay on DTensors, and what in them moves tensors between operators."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plan_api.parallelize import installed, parallelize
from plan_api.path import numbered
from plan_api.plan import Plan
from plan_api.resolve import is_inside
from plan_api.static.compare import gradients, kept
from plan_api.static.twin import twin_of
from plan_api.track import Collective, Phase, Record, track

__all__ = ["around", "why", "widened"]

_MOST = 5  # lines of a report


def around(site: str, model: nn.Module, staying: Collection[str]) -> str | None:
    """The smallest modules that are to stay, and do not yet, as a pattern; None: the model itself.

    Args:
        site: where static mode goes wrong: a module, or a parameter.
        model: whose they are.
        staying: patterns of modules that stay.
    """
    modules = dict(model.named_modules())
    parts = site.split(".")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        if path not in modules or not _runs(modules[path]):
            continue
        pattern = numbered(path)
        if not any(re.match(rf"{one}(?:\.|$)", path) for one in staying):
            return pattern
    return None


def widened(staying: Mapping[str, str], wider: str, reason: str) -> dict[str, str]:
    """The patterns of modules that stay, when those of one more do.

    Args:
        staying: what goes wrong without, by pattern.
        wider: the pattern; what is inside of it is said no more.
        reason: what goes wrong without, if nothing inside has said it first.
    """
    inside = [one for one in staying if one.startswith(rf"{wider}\.")]
    left = {one: told for one, told in staying.items() if one not in inside}
    return left | {wider: staying[inside[0]] if inside else reason}


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward: a list of modules has none."""
    return type(module).forward is not nn.Module.forward


def why(
    plan: Plan,
    model: nn.Module,
    pattern: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Sequence[str] | None,
) -> str:
    """The operators in modules for which DTensor moves tensors, and lines that would avoid it.

    Args:
        plan: for Eager.
        model: unmodified.
        pattern: of the modules; "" for all.
        args: of the model.
        kwargs: of the model.
        use: as of `parallelize`.
    """
    eager = parallelize(twin_of(model), plan, src_data_rank=None, use=use)
    with track(eager) as record, kept(eager), torch.enable_grad():
        result = eager(*args, **kwargs)
        gradients(result, [param for param in eager.parameters() if param.requires_grad])
    installed(eager).remove()
    told = [
        _told(record, event)
        for event in record.collectives
        if event.cause.startswith("aten.")
        and re.match(rf"{pattern}(?:\.|$)" if pattern else "", event.site or "")
    ]
    lines = [*dict.fromkeys(told)][:_MOST]
    return "\n".join(lines) or "no operator there makes DTensor move a tensor"


def _told(record: Record, event: Collective) -> str:
    site = event.site or ""
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
    where = numbered(site) or "the model"
    return (
        f"{event.cause}{placed}, in {where}, {event.phase.value}: DTensor sends {event.name} along "
        f"{event.axis!r} for it; {_remedy(record, event, site)}"
    )


def _remedy(record: Record, event: Collective, site: str) -> str:
    """The line of a plan by which the tensor comes as the operator needs it."""
    if event.phase is Phase.BACKWARD:
        return (
            f"what would avoid it: redistribute({_quoted(site, '<out>')}, ..., grad_dst=...), with "
            f"the gradient as the operator needs it"
        )
    before = [
        one
        for one in record.operators
        if one.start < event.start and one.site and one.site != site and is_inside(one.site, site)
    ]
    if before:
        made = _quoted(before[-1].site or "", "<out>")
        return f"what would avoid it: shard({made}, Replicate(), {event.axis!r})"
    return f"what would avoid it: shard({_quoted(site, '<in>')}, Replicate(), {event.axis!r})"


def _quoted(path: str, tensor: str) -> str:
    return repr(f"{numbered(path)}.{tensor}" if path else tensor)
