"""Compares what ranks are about to do, by hash, before they communicate.

fsdp calls this module. dbuffer, dist-rng and plan-api do not depend on this package and have the
same comparison in their own agreement modules, each along the axes of a mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["check_agreement", "gather_objects", "ranks_differ"]


def check_agreement(
    what: str, lines: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compares a list of lines over the ranks of a group by hash, once.

    Args:
        what: begins the message.
        lines: one for each thing that has to be the same, such as a parameter.
        group: all of its ranks have to call.
        device: of the tensors that are sent.

    Raises:
        ValueError: on every rank, where any two ranks differ: names the first line that does.
    """
    if not ranks_differ(lines, group, device):
        return
    everyone = gather_objects(list(lines), group)
    ranks = dist.get_process_group_ranks(group)
    for index in range(max(len(other) for other in everyone)):
        by_rank = [other[index] if index < len(other) else "nothing" for other in everyone]
        for rank, line in zip(ranks, by_rank, strict=True):
            if line != by_rank[0]:
                raise ValueError(
                    f"{what}: ranks differ: number {index} is {by_rank[0]} on rank {ranks[0]} and "
                    f"{line} on rank {rank}; pass the same, in the same order, on every rank"
                )


def ranks_differ(lines: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any two ranks of a group have different lines; all of its ranks have to call."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = torch.tensor(int.from_bytes(digest[:7], "big"), device=device)
    extremes = torch.stack([own, -own])  # one maximum gives the largest and the smallest hash
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return bool((extremes[0] != -extremes[1]).item())


def gather_objects(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns every rank's object, in the order of the group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone
