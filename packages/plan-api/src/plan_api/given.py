"""What the methods of a plan are given: axes and placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.path import Kind, parse

__all__ = ["Axes", "Placements", "check_counts", "per_axis"]

Axes: TypeAlias = "str | int | Sequence[str | int] | DeviceMesh | None"
Placements: TypeAlias = "Placement | Sequence[Placement]"


def check_counts(what: str, path: str, placements: Placements) -> None:
    """Looks whether a path is an argument that counts parameters that are cut.

    Raises:
        ValueError: it names something else, or a placement is no Shard, or they differ.
    """
    if parse(path).kind is not Kind.INPUT:
        raise ValueError(f"{what}: names an argument, as in 'experts.<in:top_k_index>'")
    given = (placements,) if isinstance(placements, Placement) else tuple(placements)
    if any(type(one) is not Shard or one != given[0] for one in given):
        raise ValueError(f"{what}: {placements} is not one Shard of the module's parameters")


def per_axis(placements: Placements, axes: tuple[str, ...], what: str) -> tuple[Placement, ...]:
    """A placement for each axis.

    Raises:
        ValueError: one is no placement, or counts dims from the back; there are more or fewer.
    """
    given = (placements,) if isinstance(placements, Placement) else tuple(placements)
    for one in given:
        if not isinstance(one, Placement):
            raise ValueError(
                f"{what}: {one!r} is no placement: give Shard(0), Replicate() and so on"
            )
        if isinstance(one, Shard) and one.dim < 0:
            raise ValueError(f"{what}: {one}: count dims from the front, as DTensor does")
    if len(given) != len(axes):
        raise ValueError(
            f"{what}: {len(given)} placements for {len(axes)} axes {axes}: give one for each, or "
            f"name the axes by mesh="
        )
    return given
