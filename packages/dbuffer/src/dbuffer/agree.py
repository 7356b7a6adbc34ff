"""Whether all ranks mean the same buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.base import BufferBase

__all__ = ["verify"]


def verify(buffers: Sequence[BufferBase]) -> None:
    """Compares buffers over all ranks of their mesh by hash, once; every rank has to call.

    One small all-reduce for each axis, however many buffers there are.

    Args:
        buffers: of one mesh.

    Raises:
        ValueError: buffers of several meshes; or on every rank, where any two ranks differ in a
            layout, a dtype, a placement: names the first difference.
    """
    if not buffers:
        return
    mesh = buffers[0].mesh
    if any(buffer.mesh != mesh for buffer in buffers):
        raise ValueError("verify: buffers of several meshes; call it once for each mesh")
    lines = [line for n, buffer in enumerate(buffers) for line in _lines(n, buffer)]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = torch.tensor(int.from_bytes(digest[:7], "big"), device=mesh.device_type)
    extremes = torch.stack([own, -own])  # the maximum of both tells whether all are the same
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    # All axes before anybody decides, so that all ranks decide the same.
    for group in groups:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0].item() == -extremes[1].item():
        return
    everyone: list[Any] = [(dist.get_rank(), lines)]
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, everyone, group=group)
        everyone = [one for part in parts for one in part]
    raise ValueError(_difference(sorted(everyone)))


def _lines(number: int, buffer: BufferBase) -> list[str]:
    layout = buffer.layout
    lines = [
        f"buffer {number}: {len(layout.specs)} tensors, {layout.world_size} shards of "
        f"{layout.shard_size} elements, {buffer.dtype}, {buffer.placements}, full={buffer.full}"
    ]
    for i, (spec, start) in enumerate(zip(layout.specs, layout.starts, strict=True)):
        inner = buffer.inner.get(i)
        more = "" if inner is None else f", {inner.placements} of {inner.shape}"
        lines.append(f"buffer {number}, tensor {i}: {spec} at {start}{more}")
    return lines


def _difference(everyone: Sequence[tuple[int, list[str]]]) -> str:
    """The first line that two ranks have otherwise."""
    for index in range(max(len(lines) for _, lines in everyone)):
        here = [(r, lines[index] if index < len(lines) else "nothing") for r, lines in everyone]
        for rank, line in here:
            if line != here[0][1]:
                return (
                    f"verify: ranks differ: {here[0][1]} on rank {here[0][0]}, and {line} on rank "
                    f"{rank}; plan the same layout on every rank"
                )
    return "verify: ranks differ"  # unreachable but for a collision of hashes
