"""Whether all ranks mean the same buffers.

The comparison of hashes is a copy of `fused_comm.agreement`: dbuffer does not depend on fused-comm.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.buffer import DBuffer
from dbuffer.collectives import axis_of
from dbuffer.errors import collective_errors

__all__ = ["verify"]

# In the order of the errors: a tensor that one rank lacks also moves others.
_ORDER = ("", "shape", "dtype", "block", "inner placements", "buffer", "options", "place", "plan")


def verify(
    buffers: Sequence[DBuffer],
    *,
    names: Sequence[Sequence[str]] | None = None,
    options: Sequence[str] | None = None,
) -> None:
    """Compares buffers over all ranks of their mesh by hash, once; every rank has to call.

    One small all-reduce for each axis, however many buffers there are.

    Args:
        buffers: of one mesh.
        names: of each buffer's tensors, for the error; by default the layout's.
        options: of each buffer, what else has to be the same, in words.

    Raises:
        ValueError: buffers of several meshes; or on every rank, where any two ranks differ in a
            layout, a dtype, a placement, an option: names the tensor and the first difference.
        RuntimeError: a rank does not call it, or died.
    """
    if not buffers:
        return
    mesh = buffers[0].mesh
    if any(buffer.mesh != mesh for buffer in buffers):
        raise ValueError(
            "verify: expected buffers of one mesh, got several meshes; call it once for each mesh"
        )
    facts = list(_facts(buffers, names, options))
    digest = hashlib.sha256(repr(facts).encode()).digest()
    own = torch.tensor(int.from_bytes(digest[:7], "big"), device=mesh.device_type)
    extremes = torch.stack([own, -own])  # the maximum of both tells whether all are the same
    axes = [axis_of(mesh, axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    # All axes before anybody decides, so that all ranks decide the same.
    for axis in axes:
        with collective_errors(lambda: f"verify of {_count(buffers)}", axis):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=axis.group)
    if extremes[0].item() == -extremes[1].item():
        return
    everyone: list[Any] = [(dist.get_rank(), facts)]
    for axis in axes:
        parts: list[Any] = [None] * axis.size
        dist.all_gather_object(parts, everyone, group=axis.group)
        everyone = [one for part in parts for one in part]
    raise ValueError(_difference(sorted(everyone, key=lambda one: one[0])))


@dataclass(frozen=True)
class _Fact:
    """One thing that ranks have to agree on: the `what` of `whose` is `value`."""

    whose: str
    what: str
    value: str


def _facts(
    buffers: Sequence[DBuffer],
    names: Sequence[Sequence[str]] | None,
    options: Sequence[str] | None,
) -> Iterator[_Fact]:
    count: Counter[str] = Counter()
    for number, buffer in enumerate(buffers):
        layout = buffer.layout
        for i, (spec, start) in enumerate(zip(layout.specs, layout.starts, strict=True)):
            whose = f"{spec.name!r} of buffer {number}" if names is None else repr(names[number][i])
            count[whose] += 1
            if count[whose] > 1:
                whose = f"{whose} (number {count[whose]} of that name)"
            inner = buffer.inner.get(i)
            yield _Fact(whose, "", "there")
            yield _Fact(whose, "shape", f"{spec.shape or (spec.numel,)}")
            yield _Fact(whose, "dtype", f"{buffer.dtype}")
            yield _Fact(whose, "block", f"{spec.block} elements")
            if inner is not None:
                yield _Fact(whose, "inner placements", f"{inner.placements} of {inner.shape}")
            yield _Fact(whose, "buffer", f"number {number}, of {buffer.name}")
            yield _Fact(whose, "place", f"element {start}")
        whose = f"buffer {number} ({buffer.name})"
        yield _Fact(
            whose,
            "plan",
            f"{layout.world_size} shards of {layout.shard_size} elements, {buffer.placements}, "
            f"full={buffer.full}, {buffer.collectives}",
        )
        if options is not None:
            yield _Fact(whose, "options", options[number])


def _difference(everyone: Sequence[tuple[int, list[_Fact]]]) -> str:
    """Returns the first fact that differs between two ranks."""
    by_rank = [(rank, {(f.what, f.whose): f.value for f in facts}) for rank, facts in everyone]
    found = dict.fromkeys(key for _, facts in by_rank for key in facts)
    first_rank, first = by_rank[0]
    for what, whose in sorted(found, key=lambda key: _ORDER.index(key[0])):
        here = first.get((what, whose))
        for rank, facts in by_rank[1:]:
            there = facts.get((what, whose))
            if here == there:
                continue
            if what == "":
                has, lacks = (first_rank, rank) if here else (rank, first_rank)
                text = f"{whose} is in a buffer on rank {has}, and in none on rank {lacks}"
            else:
                text = (
                    f"{what} of {whose}: {here or 'nothing'} on rank {first_rank}, and "
                    f"{there or 'nothing'} on rank {rank}"
                )
            return f"verify: ranks differ: {text}; shard the same, in the same order, on every rank"
    return "verify: ranks differ"  # unreachable but for a collision of hashes


def _count(buffers: Sequence[DBuffer]) -> str:
    return f"{len(buffers)} buffers, the first of {buffers[0].name},"
