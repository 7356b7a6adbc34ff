"""The mesh's sizes, and the constants of a machine by which the time of a step is predicted.

Note: the time model. A collective of N ranks takes ``(N - 1) * alpha + bytes * beta``, where bytes
are those that a rank sends, ``(N - 1) / N`` of a buffer; an all-reduce takes twice that.
Computation takes time per flop, per byte of operators that are not matrix products, and per
operator call; the optimizer per tensor and per byte of a rank's parameters. Collectives run one
after another. With `overlap` they run while modules compute, and only the time that a rank waits
for them counts; without it all of their time counts, as on machines whose cores also copy what is
sent. `slack` is the ratio of a measured step of a profiled model to the sum of these terms. It
accounts for what the time model leaves out, such as hooks and ranks that wait for each other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeAlias

__all__ = [
    "Compute", "Constants", "Link", "MeshLike", "MeshSize", "Update", "find_link",
    "parse_mesh_size",
]  # fmt: skip

MeshLike: TypeAlias = "int | Sequence[int] | Mapping[str, int] | MeshSize"


@dataclass(frozen=True)
class MeshSize:
    """The sizes of the mesh axes that `fully_shard` takes.

    Attributes:
        shard: number of ranks over which parameters are sharded; they are neighbours.
        replicate: number of replicas of these ranks; 1 without HSDP.
    """

    shard: int
    replicate: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return self.shard * self.replicate

    def __str__(self) -> str:
        """Returns "64 x 8 ranks" for 64 replicas of 8 ranks."""
        replicas = f"{self.replicate:,} x " if self.replicate > 1 else ""
        return f"{replicas}{self.shard:,} ranks"


@dataclass(frozen=True)
class Link:
    """How fast ranks communicate.

    Attributes:
        alpha: seconds per message.
        beta: seconds per byte.
        ranks: number of neighbouring ranks that the link connects, such as those of a node; None if
            it connects all.
    """

    alpha: float
    beta: float
    ranks: int | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_numbers(self, "alpha", "beta")
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(
                f"simulate: expected ranks of Link to be at least 1, or None, got {self.ranks!r}"
            )


@dataclass(frozen=True)
class Compute:
    """How fast modules compute.

    Attributes:
        flop: seconds per flop.
        nbyte: seconds per byte that operators other than matrix products read or write.
        op: seconds per operator call.
    """

    flop: float
    nbyte: float = 0.0
    op: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_numbers(self, "flop", "nbyte", "op")


@dataclass(frozen=True)
class Update:
    """How fast the optimizer's step is.

    Attributes:
        tensor: seconds per parameter.
        nbyte: seconds per byte of a rank's shards of the parameters.
    """

    tensor: float = 0.0
    nbyte: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_numbers(self, "tensor", "nbyte")


@dataclass(frozen=True)
class Constants:
    """The constants of a machine.

    Attributes:
        links: link of all-gathers, and of reductions unless `reduce` is given. If several are
            given, a mesh axis uses the one that connects the fewest ranks but all of the axis.
        compute: of forward and backward.
        update: of the optimizer.
        reduce: link or links of reductions.
        overlap: whether collectives run while modules compute.
        slack: a measured step over the sum of all other terms.
    """

    links: Link | Sequence[Link]
    compute: Compute
    update: Update = field(default_factory=Update)
    reduce: Link | Sequence[Link] | None = None
    overlap: bool = True
    slack: float = 1.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_numbers(self, "slack")


def find_link(links: Link | Sequence[Link], ranks: int) -> Link:
    """Returns the link that connects the fewest ranks, but at least `ranks` neighbouring ones.

    Raises:
        ValueError: no link connects that many.
    """
    candidates = [links] if isinstance(links, Link) else list(links)
    connecting = [link for link in candidates if link.ranks is None or link.ranks >= ranks]
    if not connecting:
        raise ValueError(
            f"simulate: expected a link that connects {ranks} ranks, got {candidates}; add one "
            f"with ranks=None"
        )
    return min(connecting, key=lambda link: math.inf if link.ranks is None else link.ranks)


def parse_mesh_size(mesh: MeshLike) -> MeshSize:
    """Returns the sizes of the axes of a mesh.

    Args:
        mesh: number of ranks that shard; the sizes of one axis that shards, or of two, (replicate,
            shard); or a mapping of axis names to these sizes, in this order.

    Raises:
        ValueError: it is none of these, or a size is below 1.
    """
    if isinstance(mesh, MeshSize):
        return mesh
    values: Any = mesh.values() if isinstance(mesh, Mapping) else mesh
    sizes = list(values) if isinstance(values, Iterable) else [values]
    if all(isinstance(size, SupportsIndex) for size in sizes):
        sizes = [operator.index(size) for size in sizes]
    else:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise ValueError(
            f"simulate: expected mesh to be the number of ranks that shard, or the sizes "
            f"(replicate, shard), each at least 1, got {mesh!r}"
        )
    return MeshSize(sizes[-1], math.prod(sizes[:-1]))


def _check_numbers(constants: Link | Compute | Update | Constants, *names: str) -> None:
    for name in names:
        value = getattr(constants, name)
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(
                f"simulate: expected {name} of {type(constants).__name__} to be a number, 0 or "
                f"more, got {value!r}"
            )
