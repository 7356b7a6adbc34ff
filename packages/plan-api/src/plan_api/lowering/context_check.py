"""Whether what a plan says of sequences goes together, and fits the model."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.fuse import Site
from plan_api.lowering.ir import Act, Op
from plan_api.lowering.resolve import is_inside
from plan_api.spec.axes import axis_names
from plan_api.spec.entry import Entry

__all__ = ["check_context", "sequences_of"]


def check_context(
    ops: Iterable[Op], entries: Sequence[Entry], model: nn.Module, mesh: DeviceMesh
) -> None:
    """Refuses sequences of two orders, or in an order that no attention knows, and undivided heads.

    Args:
        ops: of a plan.
        entries: the plan's.
        model: any; it is not changed.
        mesh: the plan's.

    Raises:
        ValueError: names the entries, or the module, its heads and the axes.
    """
    ops = list(ops)
    attended = {op.axis for op in ops if op.act is Act.CONTEXT}
    for op in ops:
        if op.act is Act.ORDER and _order(op) != "contiguous" and op.axis not in attended:
            raise ValueError(
                f"{entries[op.entry].said}: expected a context() entry along {op.axis!r}, without "
                f"which attention takes tokens in order {_order(op)!r} for neighbours, got none; "
                f"add context() for the modules with attention, or give order='contiguous'"
            )
    said: dict[str, Op] = {}
    for op in ops:
        if op.act not in (Act.CONTEXT, Act.ORDER):
            continue
        first = said.setdefault(op.axis, op)
        if _order(first) != _order(op):
            raise ValueError(
                f"the sequence has two orders along {op.axis!r}: {entries[first.entry].said} and "
                f"{entries[op.entry].said}; all entries of an axis have one order"
            )
        options = dict(op.options)
        if options.get("heads") is not None:
            own = model.get_submodule(op.path)
            heads = _told(own, options["heads"], entries[op.entry])
            if options["method"] == "ulysses":
                _check_heads(op, heads, ops, entries, mesh)


def sequences_of(site: Site) -> Iterator[str]:
    """Why a site is not for static mode, if it is of context parallelism."""
    for step in site.steps:
        if step.act in (Act.CONTEXT, Act.ORDER):
            yield (
                f"{site.name}:{step.tensor}:{step.index}: context parallelism knows the whole "
                f"sequence from DTensors, which static mode has not; use mode='eager'"
            )


def _order(op: Op) -> str:
    order: str = dict(op.options)["order"]
    return order


def _told(module: nn.Module, attribute: str, entry: Entry) -> int:
    found: Any = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, SupportsIndex):
        raise ValueError(
            f"{entry.said}: {type(module).__name__} has no integer {attribute!r}: heads= is the "
            f"name of an attribute that tells how many key-value heads there are"
        )
    return operator.index(found)


def _check_heads(
    op: Op, heads: int, ops: Iterable[Op], entries: Sequence[Entry], mesh: DeviceMesh
) -> None:
    """Heads are divided along the axis, and along those that cut the projections to heads."""
    axes = {op.axis: None} | {
        one.axis: None
        for one in ops
        if one.act is Act.SHARD
        and is_inside(one.path, op.path)
        and dict(entries[one.entry].options).get("unit") is not None
        and not one.dst.is_replicate()
    }
    names = axis_names(mesh)
    cut = {axis: mesh.size(names.index(axis)) for axis in axes}
    if heads % math.prod(cut.values()):
        along = " and ".join(f"{axis!r} of size {size}" for axis, size in cut.items())
        raise ValueError(
            f"{entries[op.entry].said}: {op.path} has {heads} key-value heads, which axis {along} "
            f"does not divide: method='ulysses' divides heads; use method='ring' or 'all-gather'"
        )
