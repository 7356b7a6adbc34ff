"""Parameters that stay gathered between steps: they are gathered again once they have changed.

Note: what an optimizer's part is gathered into, where it is smaller than what stays between steps.
    ZeRO-1, ZeRO-2: `ResidentAllGather`, into the unsharded parameters, which are never freed.
    HFSDP: `ReplicaGather`, over replicas into this rank's shard, from which `PlannedAllGather`
        gathers the unsharded parameters as under HSDP.
The part is a view of that memory where dtype and device agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from dbuffer import DBuffer, Handle, MemorySlice
from fsdp.collectives.all_gather import PlannedAllGather
from fsdp.collectives.comm import BufferSpec, CommStreams
from fsdp.param import FSDPParam

__all__ = ["ChangeTracker", "ReplicaGather", "ResidentAllGather", "count_optimizer_step"]

_optimizer_steps = 0  # of all optimizers; kernels of some write without a change of `_version`


def count_optimizer_step() -> None:
    """Makes all parameters count as changed, as an optimizer steps."""
    global _optimizer_steps
    _optimizer_steps += 1


class ChangeTracker:
    """Tells whether sharded parameters may have changed since they were gathered.

    All ranks have to decide the same, so the decision follows from what all of them do: the end of
    an iteration's last backward, a step of any optimizer, a loaded state dict, and in-place
    operators, which torch counts in ``_version``. Writes that torch does not count (through
    ``.data``) are seen by the first forward of an iteration all the same, as it always gathers.

    Args:
        params: of the group.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._params = params
        self._gathered: tuple[int, ...] | None = None  # versions; None: not gathered since
        self._in_iteration = False  # whether it was gathered for a backward to follow

    def is_current(self, *, for_backward: bool) -> bool:
        """Returns whether what was gathered is what the sharded parameters have.

        Args:
            for_backward: whether backward needs it, or recomputation in backward.
        """
        same_iteration = self._in_iteration or for_backward or not torch.is_grad_enabled()
        return same_iteration and self._gathered == self._versions()

    def gathered(self, *, for_backward: bool) -> None:
        """Records that parameters are gathered as they are now."""
        self._gathered = self._versions()
        self._in_iteration = for_backward or torch.is_grad_enabled()

    def expire(self) -> None:
        """Makes the parameters count as changed."""
        self._gathered, self._in_iteration = None, False

    def _versions(self) -> tuple[int, ...]:
        versions = [_optimizer_steps]
        for param in self._params:
            sharded_param: Any = param.sharded_param
            versions += [sharded_param._version, sharded_param._local_tensor._version]
        return tuple(versions)


class ResidentAllGather(PlannedAllGather):
    """Gathers parameters that are unsharded between steps: ZeRO-1, ZeRO-2, and without them DDP.

    The buffer is never freed. Where the compute dtype and device are those of the sharded
    parameters it is their buffer, `shard` with memory for all shards, and they are views of it.

    Args:
        shard: of the sharded parameters, or of replicated ones, which are not gathered.
        params: of the group.
        buffers: describes the all-gather buffer.
        dtype: of the unsharded parameters.
        streams: as of `GroupAllGather`.
        changes: of the sharded parameters.
    """

    def __init__(
        self,
        shard: DBuffer,
        params: Sequence[FSDPParam],
        buffers: BufferSpec,
        dtype: torch.dtype,
        streams: CommStreams,
        changes: ChangeTracker,
    ) -> None:
        super().__init__(shard, params, buffers, dtype, streams, None)
        self._changes, self._placements = changes, shard.placements

    def start(self, *, for_backward: bool) -> None:
        """Implements `GroupAllGather`: issues nothing if what was gathered is current."""
        streams, shard = self.streams, self._shard
        if self._changes.is_current(for_backward=for_backward):
            self._handle = Handle(lambda: None)
            return
        self._changes.gathered(for_backward=for_backward)
        if for_backward:  # changed since forward, which may still read the memory
            streams.all_gather_waits()
        with streams.on(streams.all_gather):
            if self._buffer is None:
                self._buffer = self._new_buffer()
            buffer = self._buffer
            if buffer is not shard:
                buffer.copy_(shard, non_blocking=True)
            self._handle = Handle(lambda: None)
            if shard.sharded:
                self._handle = buffer.all_gather_(async_op=True)
            self._copied_in = streams.record()

    @property
    def resident(self) -> DBuffer | None:
        """The buffer of the unsharded parameters; None until they are gathered."""
        return self._buffer

    @property
    def memory(self) -> None:
        """Implements `GroupAllGather`: no other buffer may use it."""

    def free(self, *, after_forward: bool, keep_storage: bool) -> None:
        """Implements `GroupAllGather`: the memory stays."""
        assert self._buffer is not None
        self._buffer.set_placements(self._placements)

    def _new_buffer(self) -> DBuffer:
        shard = self._shard
        if shard.full and (shard.dtype, shard.device) == (self._dtype, self._buffers.device):
            return shard
        return super()._new_buffer()


class ReplicaGather:
    """Gathers over HSDP's replicas what each of them has updated of their common shard.

    Args:
        shard: of the parameters between steps, on (replicate, shard), of the dtype that is
            gathered over the replicas.
        buffers: describes the buffers on this mesh.
        changes: of the sharded parameters.

    Attributes:
        shard: as the argument.
        part: memory for this replica's part of it.
    """

    def __init__(self, shard: DBuffer, buffers: BufferSpec, changes: ChangeTracker) -> None:
        self.shard, self._changes = shard, changes
        self._over_replicas = buffers.over_replicas(shard)
        own = self._over_replicas
        nbytes = own.layout.shard_size * own.dtype.itemsize
        self.part = MemorySlice(own.memory, own.rank * nbytes, nbytes)
        self.source: DBuffer | None = None  # of the sharded parameters, where that is not `part`

    def gather(self, *, for_backward: bool) -> None:
        """Implements `UpdateGather`."""
        if self._changes.is_current(for_backward=for_backward):
            return
        self._changes.gathered(for_backward=for_backward)
        over_replicas = self._over_replicas
        over_replicas.set_placements((Shard(0),))
        if self.source is not None:
            over_replicas.local.copy_(self.source.local, non_blocking=True)
        over_replicas.all_gather_()
