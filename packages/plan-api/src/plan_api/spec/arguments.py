"""What the methods of a plan are given: axes and placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.path import Kind, parse

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
    given = _listed(placements, what)
    if any(type(one) is not Shard or one != given[0] for one in given):
        raise ValueError(f"{what}: {placements} is not one Shard of the module's parameters")


def per_axis(
    placements: Placements | None, axes: tuple[str, ...], what: str
) -> tuple[Placement, ...]:
    """A placement for each axis.

    Raises:
        ValueError: one is no placement, or counts dims from the back; there are more or fewer.
    """
    given = _listed(placements, what)
    for one in given:
        if isinstance(one, Shard) and one.dim < 0:
            raise ValueError(f"{what}: {one}: count dims from the front, as DTensor does")
    if len(given) != len(axes):
        raise ValueError(
            f"{what}: {len(given)} placements for {len(axes)} axes {axes}: give one for each, or "
            f"name the axes by mesh="
        )
    return given


def _listed(placements: Any, what: str) -> tuple[Placement, ...]:
    """The placements, where one is given alone or several are.

    Raises:
        ValueError: one of them is something else.
    """
    several = isinstance(placements, Sequence) and not isinstance(placements, str)
    given = tuple(placements) if several else (placements,)
    for one in given:
        if not isinstance(one, Placement):
            dim = isinstance(one, int) and not isinstance(one, bool) and one >= 0
            meant = f"; did you mean Shard({one})?" if dim else ""
            meant = "; did you mean Replicate()?" if one is None else meant
            raise ValueError(
                f"{what}: expected a placement of torch.distributed.tensor, such as Shard(0), "
                f"Replicate() or Partial(), got {one!r}{meant}"
            )
    return given
