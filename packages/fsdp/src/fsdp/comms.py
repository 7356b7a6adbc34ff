"""How a group's data moves: by the buffers' own collectives, or by what a user puts in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import Axis, Collectives, Strategy, collectives_for, own_row
from fsdp._compat import AllGather, ReduceScatter

__all__ = ["Comms"]


class Comms:
    """`dbuffer.Collectives` of one group, that may be changed between steps.

    torch's `AllGather` and `ReduceScatter` objects bring memory of their own, so each costs a copy
    that the buffers' own collectives do without.

    Args:
        strategy: of the buffers' own.

    Attributes:
        all_gather_comm: in place of the buffers' all-gather.
        reduce_scatter_comm: in place of the buffers' reduce-scatter.
        reduce_group: that reduce-scatters use; None for the mesh's.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy: Strategy = strategy
        self.all_gather_comm: AllGather | None = None
        self.reduce_scatter_comm: ReduceScatter | None = None
        self.reduce_group: dist.ProcessGroup | None = None
        self._staging: tuple[AllGather | None, ReduceScatter | None] = (None, None)

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Callable[[], None]:
        """As `dbuffer.Collectives.all_gather`."""
        comm = self.all_gather_comm
        if comm is None:
            return self._own(flat, axis).all_gather(flat, axis, own)
        staged = comm.allocate(flat.shape, dtype=flat.dtype, device=flat.device)
        row = own_row(staged, axis)
        row.copy_(own)
        work = comm(output_tensor=staged, input_tensor=row, group=axis.group, async_op=True)
        return _ending(work, flat, lambda: flat.copy_(staged))

    def reduce_scatter(
        self, flat: torch.Tensor, axis: Axis, *, average: bool
    ) -> Callable[[], None]:
        """As `dbuffer.Collectives.reduce_scatter`."""
        comm = self.reduce_scatter_comm
        if self.reduce_group is not None:
            axis = replace(axis, group=self.reduce_group)
        if comm is None:
            return self._own(flat, axis).reduce_scatter(flat, axis, average=average)
        staged = comm.allocate(flat.shape, dtype=flat.dtype, device=flat.device)
        staged.copy_(flat)
        own = own_row(flat, axis)
        reduced = comm.allocate(own.shape, dtype=flat.dtype, device=flat.device)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work = comm(
            output_tensor=reduced, input_tensor=staged, group=axis.group, op=op, async_op=True
        )
        return _ending(work, flat, lambda: own.copy_(reduced))

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Callable[[], None]:
        """As `dbuffer.Collectives.all_reduce`; always the buffers' own."""
        return self._own(flat, axis).all_reduce(flat, axis, average=average)

    def stage_by(self, gather: AllGather | None, reduce: ReduceScatter | None) -> None:
        """Stages by torch's own allocating collectives, or no longer.

        Raises:
            ValueError: a user has set others, which allocate as they like; the strategy's are
                sends and receives.
        """
        set_before = (self.all_gather_comm, self.reduce_scatter_comm)
        if gather is None or reduce is None:
            if self.all_gather_comm is self._staging[0]:
                self.all_gather_comm = None
            if self.reduce_scatter_comm is self._staging[1]:
                self.reduce_scatter_comm = None
            self._staging = None, None
            return
        if self._strategy == "exchange":
            raise ValueError(
                "fsdp: expected strategy 'auto' or 'native' for memory of the process group or "
                "symmetric memory, got 'exchange', which sends and receives without staging; give "
                "fully_shard another strategy"
            )
        if set_before != (None, None) and set_before != self._staging:
            kinds = " and ".join(type(one).__name__ for one in set_before if one is not None)
            raise ValueError(
                f"fsdp: {kinds} were set by set_custom_all_gather or set_custom_reduce_scatter, "
                f"and say themselves where memory comes from; leave one of the two out"
            )
        self._staging = self.all_gather_comm, self.reduce_scatter_comm = gather, reduce

    def _own(self, flat: torch.Tensor, axis: Axis) -> Collectives:
        return collectives_for(self._strategy, axis, flat.device)


def _ending(
    work: dist.Work | None, flat: torch.Tensor, copy: Callable[[], object]
) -> Callable[[], None]:
    """What is left to do when a collective has ended; on a GPU it is issued at once.

    There the staging memory must be used and freed on the stream that allocated it, which is the
    one that is current now, so whoever waits waits for that stream.
    """
    if flat.device.type == "cpu":

        def finish() -> None:
            if work is not None:
                work.wait()
            copy()

        return finish
    if work is not None:
        work.wait()
    copy()
    module: Any = torch.get_device_module(flat.device)
    event = module.current_stream().record_event()
    return lambda: module.current_stream().wait_event(event)
