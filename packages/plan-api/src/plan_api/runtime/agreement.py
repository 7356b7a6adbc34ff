"""Whether all ranks of a mesh are about to do the same.

The comparison of hashes is a copy of `fused_comm.agreement`: plan-api runs without fused-comm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_agreement", "differs_anywhere", "first_anywhere"]


def check_agreement(lines: Sequence[str], mesh: DeviceMesh) -> None:
    """Compares a list of lines over all ranks of a mesh, by hash, along one axis after another.

    Args:
        lines: one for each thing that has to be alike.
        mesh: all of its ranks have to call.

    Raises:
        ValueError: on every rank, where any two differ: names the first line of a rank that does.
    """
    own = _number(lines)
    # The maximum of both tells whether all are the same.
    extremes = torch.tensor([own, -own], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if (extremes[0] == -extremes[1]).item():
        return
    everyone: list[list[str]] = [list(lines)]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        gathered: list[list[list[str]]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = [one for some in gathered for one in some]
    for number in range(max(map(len, everyone))):
        here = [one[number] if number < len(one) else "nothing" for one in everyone]
        for rank, line in zip(mesh.mesh.flatten().tolist(), here, strict=False):
            if line != here[0]:
                raise ValueError(
                    f"the plan differs between ranks: operation {number} is {here[0]} on one and "
                    f"{line} on another; of {len(here)} ranks (rank {rank} is one of them) all "
                    f"have to be given the same plan and model"
                )


def _number(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def differs_anywhere(differs: bool, mesh: DeviceMesh) -> bool:
    """Whether it does on any rank of a mesh, all of which call."""
    flag = torch.tensor(int(differs), device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return bool(flag.item())


def first_anywhere(site: str, mesh: DeviceMesh) -> str:
    """The first site that ranks of a mesh have; all of them call, and get the same."""
    for axis in range(mesh.ndim):
        sites: list[Any] = [""] * mesh.size(axis)
        dist.all_gather_object(sites, site, group=mesh.get_group(axis))
        site = next(filter(None, sites), "")
    return site
