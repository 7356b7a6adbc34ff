"""The arguments of a plan's methods that place tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.path import PathKind, parse_path

__all__ = [
    "Axes", "Placements", "check_chunks", "check_indexed_placements", "placements_per_axis",
]  # fmt: skip

Axes: TypeAlias = "str | int | Sequence[str | int] | DeviceMesh | None"
Placements: TypeAlias = "Placement | Sequence[Placement]"


def check_indexed_placements(what: str, path: str, placements: Placements) -> None:
    """Refuses placements of parameters that an argument cannot index into.

    Args:
        what: begins messages.
        path: of the argument.
        placements: of the parameters.

    Raises:
        ValueError: the path names no argument, or the placements are not Shards of one dim.
    """
    if parse_path(path).kind is not PathKind.INPUT:
        raise ValueError(f"{what}: expected an argument, as in 'experts.<in:top_k_index>'")
    listed = _listed(placements, what)
    if any(type(one) is not Shard or one != listed[0] for one in listed):
        raise ValueError(f"{what}: expected one Shard of the module's parameters, got {placements}")


def check_chunks(what: str, chunks: Any) -> None:
    """Refuses what is no number of chunks.

    Args:
        what: begins the message.
        chunks: any value.

    Raises:
        ValueError: it is no integer, or less than 1.
    """
    is_number = isinstance(chunks, SupportsIndex) and not isinstance(chunks, bool)
    if not is_number or operator.index(chunks) < 1:
        raise ValueError(f"{what}: chunks: expected a number of at least 1, got {chunks!r}")


def placements_per_axis(
    placements: Placements | None, axes: tuple[str, ...], what: str
) -> tuple[Placement, ...]:
    """Returns one placement per axis.

    Args:
        placements: one, or one per axis.
        axes: of an entry.
        what: begins messages.

    Raises:
        ValueError: one is no placement, or has a negative dim; there are more or fewer.
    """
    listed = _listed(placements, what)
    for one in listed:
        if isinstance(one, Shard) and one.dim < 0:
            raise ValueError(f"{what}: {one}: count dims from the front, as DTensor does")
    if len(listed) != len(axes):
        raise ValueError(
            f"{what}: {len(listed)} placements for {len(axes)} axes {axes}: give one for each, or "
            f"name the axes by mesh="
        )
    return listed


def _listed(placements: Any, what: str) -> tuple[Placement, ...]:
    several = isinstance(placements, Sequence) and not isinstance(placements, str)
    listed = tuple(placements) if several else (placements,)
    for one in listed:
        if not isinstance(one, Placement):
            dim = isinstance(one, int) and not isinstance(one, bool) and one >= 0
            suggestion = f"; did you mean Shard({one})?" if dim else ""
            suggestion = "; did you mean Replicate()?" if one is None else suggestion
            raise ValueError(
                f"{what}: expected a placement of torch.distributed.tensor, such as Shard(0), "
                f"Replicate() or Partial(), got {one!r}{suggestion}"
            )
    return listed
