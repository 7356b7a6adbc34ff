"""How many ranks shard and how many replicate, without any of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

__all__ = ["MeshLike", "MeshSize", "mesh_size"]

MeshLike: TypeAlias = "int | Sequence[int] | Mapping[str, int] | MeshSize"


@dataclass(frozen=True)
class MeshSize:
    """Sizes of the axes that `fully_shard` knows.

    Attributes:
        shard: ranks that a group is cut over, next to each other.
        replicate: how often there are such, 1 without HSDP.
    """

    shard: int
    replicate: int = 1

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return self.shard * self.replicate

    def __str__(self) -> str:
        return f"{self.replicate:,} x {self.shard:,} ranks" if self.replicate > 1 else (
            f"{self.shard:,} ranks"
        )  # fmt: skip


def mesh_size(mesh: MeshLike) -> MeshSize:
    """The axes of a mesh that is given by its sizes.

    Args:
        mesh: ranks; sizes of one axis that shards, or of two, (replicate, shard); or the same by
            name, in that order.

    Raises:
        ValueError: neither, or a size below 1.
    """
    if isinstance(mesh, MeshSize):
        return mesh
    given: Any = mesh.values() if isinstance(mesh, Mapping) else mesh
    sizes = list(given) if isinstance(given, Iterable) else [given]
    if all(isinstance(size, SupportsIndex) for size in sizes):
        sizes = [operator.index(size) for size in sizes]
    else:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise ValueError(
            f"simulate: mesh={mesh!r}; wants the ranks that shard, or sizes of at least 1 of "
            f"(replicate, shard)"
        )
    return MeshSize(sizes[-1], math.prod(sizes[:-1]))
