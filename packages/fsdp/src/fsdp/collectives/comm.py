"""What the collectives of a parameter group share: its buffers, how data is sent, streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from dbuffer import (
    Axis,
    BufferMemory,
    Collectives,
    DBuffer,
    Inner,
    MemorySlice,
    Strategy,
    collectives_for,
    own_row,
)
from fsdp._compat import AllGather, ReduceScatter
from fsdp.collectives.narrow import NarrowReductions
from fsdp.mesh import replica_mesh, sharded_placements
from fsdp.param import FSDPParam, param_names
from ragged_shard.planner import Layout, TensorSpec, plan_layout

__all__ = ["BufferSpec", "CommStreams", "GroupCollectives", "merge_shards"]


class CommStreams:
    """The CUDA streams that all-gathers and reduce-scatters are issued on.

    The memory of an all-gather is allocated on its stream, and freed there once compute has used
    it; gradients are copied in on the compute stream and reduced on the other one.

    Args:
        device: that computes; on the host there are no streams, and all methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None
        self.all_gather: Any = None
        self.reduce_scatter: Any = None
        if device.type not in ("cpu", "meta"):
            self._module = torch.get_device_module(device)
            # Of high priority, so that compute does not delay what other ranks wait for.
            self.all_gather = self._module.Stream(priority=-1)
            self.reduce_scatter = self._module.Stream(priority=-1)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes one of these streams the current one."""
        if self._module is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record(self) -> Any:
        """Records an event on the current stream."""
        return None if self._module is None else self._module.current_stream().record_event()

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        if self._module is not None and event is not None:
            self._module.current_stream().wait_event(event)

    def all_gather_waits(self, event: Any = None) -> None:
        """Makes the all-gather stream wait for an event, by default for the current stream."""
        if self._module is not None:
            self.all_gather.wait_event(self.record() if event is None else event)


class GroupCollectives:
    """The `dbuffer.Collectives` of one group, which may be changed between steps.

    torch's `AllGather` and `ReduceScatter` objects allocate memory of their own, so each costs a
    copy that the buffers' own collectives do without.

    Args:
        strategy: of the buffers' own collectives.

    Attributes:
        strategy: as the argument; that of collectives over replicas, too.
        custom_all_gather: replaces the buffers' all-gather.
        custom_reduce_scatter: replaces the buffers' reduce-scatter.
        reduce_group: process group of reduce-scatters; None for the mesh's.
    """

    def __init__(self, strategy: Strategy | NarrowReductions) -> None:
        self.strategy = strategy
        self.custom_all_gather: AllGather | None = None
        self.custom_reduce_scatter: ReduceScatter | None = None
        self.reduce_group: dist.ProcessGroup | None = None
        # what `stage` has set, to tell it from what a user has set
        self._staging: tuple[AllGather | None, ReduceScatter | None] = (None, None)

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Callable[[], None]:
        """Implements `dbuffer.Collectives.all_gather`."""
        comm = self.custom_all_gather
        if comm is None:
            return self._native(flat, axis).all_gather(flat, axis, own)
        all_gather_output = comm.allocate(flat.shape, dtype=flat.dtype, device=flat.device)
        all_gather_input = own_row(all_gather_output, axis)
        all_gather_input.copy_(own)
        work = comm(
            output_tensor=all_gather_output, input_tensor=all_gather_input, group=axis.group,
            async_op=True,
        )  # fmt: skip
        return _finish(work, flat, lambda: flat.copy_(all_gather_output))

    def reduce_scatter(
        self, flat: torch.Tensor, axis: Axis, *, average: bool
    ) -> Callable[[], None]:
        """Implements `dbuffer.Collectives.reduce_scatter`."""
        comm = self.custom_reduce_scatter
        if self.reduce_group is not None:
            axis = replace(axis, group=self.reduce_group)
        if comm is None:
            return self._native(flat, axis).reduce_scatter(flat, axis, average=average)
        reduce_scatter_input = comm.allocate(flat.shape, dtype=flat.dtype, device=flat.device)
        reduce_scatter_input.copy_(flat)
        own = own_row(flat, axis)
        reduce_output = comm.allocate(own.shape, dtype=flat.dtype, device=flat.device)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work = comm(
            output_tensor=reduce_output, input_tensor=reduce_scatter_input, group=axis.group,
            op=op, async_op=True,
        )  # fmt: skip
        return _finish(work, flat, lambda: own.copy_(reduce_output))

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Callable[[], None]:
        """Implements `dbuffer.Collectives.all_reduce`, always by the buffers' own."""
        return self._native(flat, axis).all_reduce(flat, axis, average=average)

    def stage(self, gather: AllGather | None, reduce: ReduceScatter | None) -> None:
        """Sets torch's allocating collectives, or removes those that it has set before.

        Raises:
            ValueError: a user has set other collectives, which allocate as they like; the
                strategy is "exchange", which sends and receives.
        """
        current = (self.custom_all_gather, self.custom_reduce_scatter)
        if gather is None or reduce is None:
            if self.custom_all_gather is self._staging[0]:
                self.custom_all_gather = None
            if self.custom_reduce_scatter is self._staging[1]:
                self.custom_reduce_scatter = None
            self._staging = None, None
            return
        self.check_wide("memory of the process group or symmetric memory")
        if self.strategy == "exchange":
            raise ValueError(
                "fsdp: expected strategy 'auto' or 'native' for memory of the process group or "
                "symmetric memory, got 'exchange', which sends and receives without staging; give "
                "fully_shard another strategy"
            )
        if current != (None, None) and current != self._staging:
            kinds = " and ".join(type(one).__name__ for one in current if one is not None)
            raise ValueError(
                f"fsdp: {kinds} were set by set_custom_all_gather or set_custom_reduce_scatter, "
                f"and allocate memory themselves; leave one of the two out"
            )
        self._staging = self.custom_all_gather, self.custom_reduce_scatter = gather, reduce

    def check_wide(self, what: str) -> None:
        """Refuses what replaces the reduce-scatter of gradients that are sent narrow.

        Raises:
            ValueError: fully_shard has a ``send_dtype``.
        """
        if isinstance(self.strategy, NarrowReductions):
            raise ValueError(
                f"fsdp: expected no send_dtype beside {what}, whose reduce-scatter sends the dtype "
                f"of the sums; leave one of the two out"
            )

    def _native(self, flat: torch.Tensor, axis: Axis) -> Collectives:
        return collectives_for(self.strategy, axis, flat.device)


def _finish(
    work: dist.Work | None, flat: torch.Tensor, copy: Callable[[], object]
) -> Callable[[], None]:
    """Returns what waits for a collective and copies its result; on a GPU both are issued now.

    There the staging memory must be used and freed on the stream that allocated it, which is the
    current one, so the function that is returned waits for that stream.
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


@dataclass(frozen=True, eq=False)
class BufferSpec:
    """Describes the buffers of one group.

    Attributes:
        layout: of gradients and, where parameters are planned, of these.
        mesh: of one axis, or of two for HSDP.
        device: that computes.
        collectives: of the buffers with memory for all shards.
        params: of the group, whose names errors use.
    """

    layout: Layout
    mesh: DeviceMesh
    device: torch.device
    collectives: GroupCollectives
    params: Sequence[FSDPParam]

    def full_buffer(
        self,
        dtype: torch.dtype,
        layout: Layout | None = None,
        memory: BufferMemory | None = None,
        params: Sequence[int] | None = None,
    ) -> DBuffer:
        """Returns a buffer with room for all shards, sharded, on the device that computes.

        Args:
            dtype: of its content.
            layout: where it is another than the group's.
            memory: which no buffer uses; by default new memory of its own.
            params: the numbers of the parameters that a layout of some of them has; None: tensors
                of another layout are no parameters.
        """
        inner = self.inner if layout is None else {}
        if layout is not None and params is not None:
            inner = {n: self.inner[i] for n, i in enumerate(params) if i in self.inner}
        return DBuffer(
            layout or self.layout, self.mesh, sharded_placements(self.mesh), dtype, self.device,
            full=True, strategy=self.collectives, inner=inner, memory=memory, name=self.names,
        )  # fmt: skip

    def over_replicas(self, buffer: DBuffer) -> DBuffer:
        """Returns a buffer of this rank's shard, in its memory, that is sharded over the replicas.

        Args:
            buffer: of these, allocated, on (replicate, shard).
        """
        shard_size, itemsize = buffer.layout.shard_size, buffer.dtype.itemsize
        begin = buffer.rank * shard_size if buffer.full else 0
        mesh = replica_mesh(self.mesh)
        return DBuffer(
            plan_layout((TensorSpec("shard", shard_size),), mesh.size()), mesh, (Shard(0),),
            buffer.dtype, buffer.device, full=True, name=self.names,
            memory=MemorySlice(buffer.memory, begin * itemsize, shard_size * itemsize),
            strategy=self.collectives.strategy,
        )  # fmt: skip

    @property
    def inner(self) -> Mapping[int | str, Inner]:
        """Where parameters are placed on other axes too: they may be smaller than in the layout."""
        return {
            i: param.placement.inner
            for i, param in enumerate(self.params)
            # Buffers of extensions have chunks of local tensors.
            if param.placement is not None
            and param.placement.inner is not None
            and not param.extension
        }

    def names(self) -> str:
        """Returns the names of the parameters, at most four of them."""
        return param_names(self.params)


def merge_shards(layout: Layout, ranks: int) -> Layout:
    """Returns a layout of fewer shards, each several neighbouring ones: it splits no block either.

    Args:
        layout: whose shards are merged.
        ranks: how many there will be, a divisor of their number.
    """
    return replace(
        layout, world_size=ranks, shard_size=layout.buffer_size // ranks, proved_lower_bound=0,
        exact=False,
    )  # fmt: skip
