"""Collectives that send the terms of gradients in a narrower dtype than they are added in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Axis, Collectives, Strategy, collectives_for, own_row
from fused_comm.narrow_sums import (
    SendDtype,
    checked_send_dtype,
    narrow_all_reduce,
    narrow_reduce_scatter,
    send_dtype_of,
)

__all__ = ["NarrowReductions", "ranks_of", "send_dtypes"]


def send_dtypes(given: SendDtype, mesh: DeviceMesh) -> dict[int, torch.dtype]:
    """Returns the dtypes in which terms are sent, by the number of the axis.

    Args:
        given: to fully_shard.
        mesh: of data parallelism.

    Raises:
        ValueError: a dtype in which nothing is sent; an axis that the mesh lacks.
    """
    given = checked_send_dtype("fully_shard", given)
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    if isinstance(given, Mapping):
        known = {*range(mesh.ndim), *(name for name in names if name is not None)}
        for axis in given:
            if axis not in known:
                raise ValueError(
                    f"fully_shard: send_dtype: expected axes of the mesh of data parallelism, "
                    f"{names if mesh.mesh_dim_names else [*range(mesh.ndim)]}, got {axis!r}"
                )
    by_axis = {axis: send_dtype_of(given, axis, name) for axis, name in enumerate(names)}
    return {axis: dtype for axis, dtype in by_axis.items() if dtype is not None}


def ranks_of(mesh: DeviceMesh, axis: int) -> frozenset[int]:
    """Returns the global ranks along an axis that this rank is one of."""
    return frozenset(dist.get_process_group_ranks(mesh.get_group(axis)))


@dataclass(frozen=True, eq=False)
class NarrowReductions:
    """The collectives of a strategy, but for sums over some axes, whose terms are sent narrow.

    Attributes:
        strategy: of all other collectives.
        sent: the dtypes in which terms are sent, by the ranks along the axis, which may have
            several process groups.
    """

    strategy: Strategy
    sent: Mapping[frozenset[int], torch.dtype]

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Any:
        """Implements `dbuffer.Collectives.all_gather`."""
        return self._others(flat, axis).all_gather(flat, axis, own)

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Any:
        """Implements `dbuffer.Collectives.reduce_scatter`."""
        dtype = self.sent.get(frozenset(axis.ranks))
        if dtype is None:
            return self._others(flat, axis).reduce_scatter(flat, axis, average=average)
        own, rows = own_row(flat, axis), flat.view(axis.size, -1)
        order = [axis.ranks.index(rank) for rank in dist.get_process_group_ranks(axis.group)]
        if order != sorted(order):  # the group may number the ranks otherwise than the mesh
            rows = rows[order]
        total = narrow_reduce_scatter(own, rows.view(-1), dtype, axis.group)

        def finish() -> None:
            total.wait()
            if average:
                own.div_(axis.size)

        return finish

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Any:
        """Implements `dbuffer.Collectives.all_reduce`."""
        dtype = self.sent.get(frozenset(axis.ranks))
        if dtype is None:
            return self._others(flat, axis).all_reduce(flat, axis, average=average)
        total = narrow_all_reduce(flat.view(-1), dtype, axis.group)

        def finish() -> None:
            total.wait()
            if average:
                flat.div_(axis.size)

        return finish

    def _others(self, flat: torch.Tensor, axis: Axis) -> Collectives:
        return collectives_for(self.strategy, axis, flat.device)
