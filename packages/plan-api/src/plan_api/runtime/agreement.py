"""Agreement between the ranks of a mesh.

The comparison of hashes is a copy of `fused_comm.agreement`: plan-api runs without fused-comm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "check_agreement", "first_site_on_any_rank", "true_on_all_ranks", "true_on_any_rank",
]  # fmt: skip


def check_agreement(lines: Sequence[str], mesh: DeviceMesh) -> None:
    """Compares lists of lines between all ranks of a mesh, by hash, along one axis at a time.

    Args:
        lines: each of them has to be the same on all ranks.
        mesh: all of its ranks have to call.

    Raises:
        ValueError: on every rank, if two ranks differ: names the first line in which they do.
    """
    own = _hash(lines)
    # The hashes are equal if the maximum of the hash is that of its negation.
    extremes = torch.tensor([own, -own], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if (extremes[0] == -extremes[1]).item():
        return
    of_ranks: list[list[str]] = [list(lines)]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        gathered: list[list[list[str]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, of_ranks, group=group)
        of_ranks = [one for some in gathered for one in some]
    for number in range(max(map(len, of_ranks))):
        those = [of_rank[number] if number < len(of_rank) else "nothing" for of_rank in of_ranks]
        for rank, line in zip(mesh.mesh.flatten().tolist(), those, strict=False):
            if line != those[0]:
                raise ValueError(
                    f"the plan differs between ranks: operation {number} is {those[0]} on one and "
                    f"{line} on another; of {len(those)} ranks (rank {rank} is one of them) all "
                    f"have to be given the same plan and model"
                )


def _hash(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def true_on_any_rank(flag: bool, mesh: DeviceMesh) -> bool:
    """Whether a flag is true on any rank of a mesh; all of its ranks have to call."""
    [on_none] = true_on_all_ranks([not flag], mesh)
    return not on_none


def true_on_all_ranks(flags: Sequence[bool], mesh: DeviceMesh) -> list[bool]:
    """Whether each flag is true on all ranks of a mesh; all of its ranks have to call."""
    false = torch.tensor([not flag for flag in flags], dtype=torch.int8, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(false, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [not one for one in false.tolist()]


def first_site_on_any_rank(site: str, mesh: DeviceMesh) -> str:
    """Returns the first nonempty site of a mesh's ranks, the same on all; collective."""
    for axis in range(mesh.ndim):
        sites: list[Any] = [""] * mesh.size(axis)
        dist.all_gather_object(sites, site, group=mesh.get_group(axis))
        site = next(filter(None, sites), "")
    return site
