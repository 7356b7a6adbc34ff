"""Plans of a reducer: made when gradients are seen for the first time, alike on all ranks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from fused_comm.agree import differ, exchange
from fused_comm.axes import FlatGroup
from fused_comm.bucket import Entry, Route, route_of
from fused_comm.gradient import Gradient
from fused_comm.reduction import Reduction, Scatter, expected, local_of

__all__ = ["Options", "Seen", "agree_on", "entry_of"]


@dataclass(frozen=True)
class Options:
    """How gradients are reduced; the arguments of `GradReducer` that plans depend on."""

    bucket_bytes: int
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    fuse_axes: bool
    op: Literal["sum", "avg"] | None
    plain: FlatGroup | None
    timeout: datetime.timedelta | None


@dataclass(frozen=True)
class Seen:
    """What a rank knows of a gradient's reduction, in values that can be sent."""

    reduced: tuple[int, ...]
    scattered: tuple[tuple[int, int], ...]
    averaged: bool
    dtype: torch.dtype


def agree_on(
    gradients: Sequence[Gradient],
    numbers: Sequence[int],
    order: Iterable[int],
    everyone: FlatGroup,
) -> dict[int, Reduction]:
    """What the gradients need that any rank has.

    Args:
        gradients: all of the reducer's.
        numbers: those that are not known yet, ascending.
        order: the numbers in the order in which this rank's backward made them.
        everyone: the group of all ranks that have these parameters; all of them have to call.

    Returns:
        the same on all ranks, by number, in the order in which they come.

    Raises:
        ValueError: on every rank, where two ranks have a gradient that needs different reductions.
    """
    own = {
        number: reduction
        for number in numbers
        if (reduction := gradients[number].reduction()) is not None
    }
    order = [number for number in order if number in own]
    order += [number for number in reversed(numbers) if number in own and number not in set(order)]
    lines = [f"{gradients[number].name}: {own.get(number, 'none')}" for number in numbers]
    device = local_of(gradients[0].param).device
    if differ([*lines, str(order)], everyone.group, device):
        seen = {number: _seen(own[number]) for number in order}
        order, seen = _merged(gradients, exchange(seen, everyone.group), everyone)
        for number in order:
            if number not in own:
                own[number] = _reduction(gradients[number].param, seen[number])
    return {number: own[number] for number in order}


def entry_of(number: int, reduction: Reduction, options: Options) -> Entry:
    """What goes into a bucket, with its route, for which all ranks have to call."""
    dtype = options.reduce_dtype or options.accumulate_dtype or reduction.dtype
    # DistributedDataParallel's mean for plain tensors; a DTensor's Partial says what it is.
    op = options.op or ("avg" if reduction.mesh is None else "sum")
    averaged = reduction.averaged or op == "avg"
    if reduction.mesh is not None:
        route = route_of(reduction, dtype, averaged, options.fuse_axes, options.timeout)
    else:
        assert options.plain is not None  # parameters.py has refused it
        route = Route((), (options.plain,), dtype, reduction.device, averaged)
    return Entry(number, reduction, route)


def _seen(reduction: Reduction) -> Seen:
    scattered = tuple((one.axis, one.dim) for one in reduction.scattered)
    return Seen(reduction.reduced, scattered, reduction.averaged, reduction.dtype)


def _merged(
    gradients: Sequence[Gradient], everyones: Sequence[dict[int, Seen]], everyone: FlatGroup
) -> tuple[list[int], dict[int, Seen]]:
    """The union of what ranks have seen; dicts are in the order of the gradients' coming."""
    ranks = dist.get_process_group_ranks(everyone.group)
    merged: dict[int, Seen] = {}
    first: dict[int, int] = {}
    for rank, theirs in zip(ranks, everyones, strict=True):
        for number, seen in theirs.items():
            if merged.setdefault(number, seen) != seen:
                raise ValueError(
                    f"gradient of {gradients[number].name!r} differs between ranks: it needs "
                    f"{merged[number]} on rank {first[number]} and {seen} on rank {rank}"
                )
            first.setdefault(number, rank)
    return list(merged), merged


def _reduction(param: torch.Tensor, seen: Seen) -> Reduction:
    scattered = tuple(Scatter(axis, dim) for axis, dim in seen.scattered)
    return expected(param, seen.reduced, scattered, seen.averaged, seen.dtype)
