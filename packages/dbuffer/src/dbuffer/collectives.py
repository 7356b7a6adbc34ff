"""The collectives of a buffer along one mesh axis, in place, each as a strategy has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import _compat

__all__ = [
    "Axis",
    "Collectives",
    "Finish",
    "Native",
    "Strategy",
    "axis_of",
    "collectives_for",
    "own_row",
]

Strategy: TypeAlias = Literal["auto", "native", "exchange"]
# Waits for a collective, and does what is left to be done when it has ended.
Finish: TypeAlias = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks along a mesh axis.

    Attributes:
        name: what errors call it.
        group: their process group.
        ranks: global ranks, in the order of the mesh, which is the order of shards.
        position: this rank's place among them.
        tag: under which a buffer sends between pairs of ranks, below 2 ** 29; the same on all.
    """

    name: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    position: int
    tag: int = 0

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


@runtime_checkable
class Collectives(Protocol):
    """How data moves; all are started at once, and in place.

    A *row* is one of as many equal parts of `flat` as the axis has ranks; each rank owns one.
    """

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Finish:
        """Every rank's row reaches all ranks; `own` is this one's, in `flat` or elsewhere."""
        ...

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """The own row becomes the sum of all ranks' (the others become anything)."""
        ...

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Everything becomes the sum of all ranks'; `flat` may have any size."""
        ...


class Native:
    """What the backend has, in place."""

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Finish:
        """As `Collectives.all_gather`."""
        return _wait(_compat.all_gather(flat, own, axis.group))

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """As `Collectives.reduce_scatter`."""
        own, op = own_row(flat, axis), _reduce_op(axis, average=average)
        work = _compat.reduce_scatter(own, flat, op, axis.group)
        return _wait(work, own, axis.size if average and op == dist.ReduceOp.SUM else 1)

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """As `Collectives.all_reduce`."""
        op = _reduce_op(axis, average=average)
        work = _compat.all_reduce(flat, op, axis.group)
        return _wait(work, flat, axis.size if average and op == dist.ReduceOp.SUM else 1)


def own_row(flat: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's row."""
    return flat.view(axis.size, -1)[axis.position]


def axis_of(mesh: DeviceMesh, axis: int) -> Axis:
    """The ranks along an axis that this rank is in."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "checked by DBuffer"
    here = tuple(slice(None) if i == axis else at for i, at in enumerate(coordinate))
    ranks = tuple(int(rank) for rank in mesh.mesh[here].tolist())
    name = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
    return Axis(name, mesh.get_group(axis), ranks, coordinate[axis])


def collectives_for(
    strategy: Strategy | Collectives, axis: Axis, device: torch.device
) -> Collectives:
    """The collectives that a strategy means on an axis; others than ours are their own.

    "auto" is "exchange" on the host over gloo, whose own are some times slower, and "native"
    elsewhere.

    Raises:
        ValueError: a strategy that does not exist, or that cannot work here.
    """
    from dbuffer.exchange import Exchange

    if isinstance(strategy, Collectives):
        return strategy
    if strategy not in ("auto", "native", "exchange"):
        raise ValueError(
            f"DBuffer: strategy={strategy!r}; wants 'auto', 'native', 'exchange' or `Collectives`"
        )
    on_gloo = device.type == "cpu" and dist.get_backend(axis.group) == "gloo"
    if strategy == "exchange" and device.type != "cpu":
        raise ValueError(
            f"DBuffer: strategy='exchange' on {device}: it is for the host's memory; use 'native'"
        )
    if strategy == "exchange" or (strategy == "auto" and on_gloo):
        return Exchange()
    if tuple(dist.get_process_group_ranks(axis.group)) != axis.ranks:
        raise ValueError(
            f"DBuffer: axis {axis.name} holds the ranks {axis.ranks} and its process group orders "
            f"them otherwise, so native collectives would mix shards up; build the mesh with "
            f"ascending ranks, or use strategy='exchange'"
        )
    return Native()


def _reduce_op(axis: Axis, *, average: bool) -> dist.ReduceOp.RedOpType:
    """NCCL averages by itself; elsewhere the sum is divided afterwards."""
    nccl = average and dist.get_backend(axis.group) == "nccl"
    return dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM


def _wait(work: dist.Work, result: torch.Tensor | None = None, divisor: int = 1) -> Finish:
    def finish() -> None:
        work.wait()
        if result is not None and divisor != 1:
            result.div_(divisor)

    return finish
