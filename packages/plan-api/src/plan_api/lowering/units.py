"""Dims that are made of units, such as heads, of which none can be on two ranks.

A projection to heads makes one dim of them, which attention then takes apart. Where a rank's part
ends within a head torch cannot, and says so in forward, after the model is placed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import SupportsIndex

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.ir import Act, Moment, Op
from plan_api.lowering.schedule import Schedule
from plan_api.spec.axes import axis_names
from plan_api.spec.entry import Entry

__all__ = ["check_units"]


def check_units(
    ops: Iterable[Op],
    entries: Sequence[Entry],
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> None:
    """Refuses parameters that are cut within a unit while their modules run.

    Nothing is said of modules that run on local tensors, of those whose output the plan moves
    along the axis, which makes it whole first, and of a single unit, whose dim torch leaves out.

    Args:
        ops: of a plan.
        entries: the plan's.
        model: any.
        tensors: its parameters and buffers, by their first names.
        schedules: of these.
        mesh: the plan's.

    Raises:
        ValueError: a dim is cut within a unit, or is not made of units, or no module has the
            attribute that tells their size.
    """
    ops = list(ops)
    regions = tuple(op.path for op in ops if op.act is Act.LOCAL)
    moved = {(op.path, op.axis) for op in ops if op.moment is Moment.FORWARD}
    problems = []
    for op in ops:
        entry = entries[op.entry]
        unit = dict(entry.options).get("unit") if op.act is Act.SHARD else None
        if unit is None or _inside(op.path, regions):
            continue
        name, dim = f"{op.path}.{op.tensor}".lstrip("."), getattr(op.dst, "dim", None)
        cut = {
            axis: mesh.size(at)
            for at, axis in enumerate(axis_names(mesh))
            if getattr(schedules[name].run[at], "dim", None) == dim and (op.path, axis) not in moved
        }
        if isinstance(dim, int) and op.axis in cut:
            size, told = _size(op.path, unit, entry, model)
            problems += list(_problems(name, tensors[name].shape[dim], op, entry, size, told, cut))
    if problems:
        raise ValueError("the plan cuts what has to stay together:\n" + "\n".join(problems))


def _problems(
    name: str, whole: int, op: Op, entry: Entry, size: int, told: str, cut: Mapping[str, int]
) -> Iterator[str]:
    """What is wrong with one dim, of so many, that is cut along axes of these sizes."""
    dim = getattr(op.dst, "dim", None)
    parts: int = getattr(op.dst, "interleaves", 1)  # ragged-shard's InterleavedShard
    number, rest = divmod(whole, parts * size)
    if rest:
        yield f"{entry.said}: dim {dim} of {name} has {whole}, which is not made of {told}"
    if number % math.prod(cut.values()) and number != 1:
        along = " and ".join(f"{axis!r} of size {ranks}" for axis, ranks in cut.items())
        along = f"axis {along} does" if len(cut) == 1 else f"axes {along} do"
        yield (
            f"{entry.said}: dim {dim} of {name} is {number} times {told}, and {along} not divide "
            f"{number}; leave it whole there, by Replicate(), or gather what comes of it, by "
            f"shard('{op.path}.<out>', Replicate(), {op.axis!r})"
        )


def _size(path: str, unit: int | str, entry: Entry, model: nn.Module) -> tuple[int, str]:
    """Of a unit, and how it is told."""
    if isinstance(unit, int):
        return unit, f"{unit}"
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        above = ".".join(parts[:count])
        size = getattr(model.get_submodule(above), unit, None)
        if isinstance(size, SupportsIndex):
            return operator.index(size), f"{above or 'the model'}'s {unit} ({size})"
    raise ValueError(
        f"{entry.said}: neither {path} nor a module above it has an integer {unit!r}: unit= is "
        f"the name of an attribute that tells the size, or the size"
    )


def _inside(path: str, regions: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{region}.") or not region for region in regions)
