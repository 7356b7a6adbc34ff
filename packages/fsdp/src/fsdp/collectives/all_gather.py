"""The all-gather of a parameter group: into the buffer that the parameters are views of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from dbuffer import BufferMemory, DBuffer, Handle
from fsdp.collectives.comm import BufferSpec, CommStreams, merge_shards
from fsdp.param import FSDPParam

__all__ = ["GroupAllGather", "PlannedAllGather", "UpdateGather"]


class GroupAllGather(Protocol):
    """Gathers the unsharded parameters of one group, and frees them.

    Attributes:
        streams: the root's, once that is known.
        post_forward_mesh: over whose last axis parameters are sharded between forward and
            backward; None for all ranks.
    """

    streams: CommStreams
    post_forward_mesh: DeviceMesh | None

    @property
    def in_flight(self) -> bool:
        """Whether an all-gather was started and not waited for."""
        ...

    @property
    def memory(self) -> BufferMemory | None:
        """The memory of all unsharded parameters; None where they have none in common."""
        ...

    def is_complete(self, *, for_backward: bool) -> bool:
        """Returns whether unsharded parameters have all that this pass computes with."""
        ...

    def start(self, *, for_backward: bool) -> None:
        """Issues the all-gather; for backward, from the post-forward shards if there are any."""
        ...

    def wait(self) -> None:
        """Makes the current stream wait; the unsharded parameters are valid then."""
        ...

    def free(self, *, after_forward: bool, keep_storage: bool) -> None:
        """Frees the unsharded parameters, after what was issued on the current stream.

        Args:
            after_forward: whether backward follows, which may need the post-forward shards.
            keep_storage: whether the memory stays allocated.
        """
        ...

    def free_post_forward_shard(self) -> None:
        """Frees this rank's post-forward shard, if there is one."""
        ...


class UpdateGather(Protocol):
    """Gathers what other replicas have updated into this rank's shard; `ReplicaGather`."""

    def gather(self, *, for_backward: bool) -> None:
        """Makes the current stream wait for it; sends nothing where nothing has changed."""
        ...


class PlannedAllGather:
    """Gathers a SHARD buffer into the all-gather buffer; there is no copy in or out.

    Args:
        shard: buffer of this rank's shard of the parameters.
        params: of the group.
        buffers: describes the all-gather buffer.
        dtype: of the unsharded parameters.
        streams: as of `GroupAllGather`.
        post_forward_mesh: as of `GroupAllGather`.
        updates: of the shard, of which replicas have updated parts; None: they have updated all.
    """

    def __init__(
        self,
        shard: DBuffer,
        params: Sequence[FSDPParam],
        buffers: BufferSpec,
        dtype: torch.dtype,
        streams: CommStreams,
        post_forward_mesh: DeviceMesh | None,
        updates: UpdateGather | None = None,
    ) -> None:
        self.updates = updates
        self._shard, self._params, self._buffers = shard, params, buffers
        self._dtype, self.streams, self.post_forward_mesh = dtype, streams, post_forward_mesh
        self._buffer: DBuffer | None = None  # FULL: compute dtype, memory for all shards
        self._handle: Handle | None = None
        self._copied_in: Any = None  # event: this rank's shard is in the buffer
        self._post_forward: PostForwardShard | None = None

    @property
    def in_flight(self) -> bool:
        """Implements `GroupAllGather`."""
        return self._handle is not None

    @property
    def memory(self) -> BufferMemory | None:
        """Implements `GroupAllGather`."""
        return None if self._buffer is None else self._buffer.memory

    def is_complete(self, *, for_backward: bool) -> bool:
        """Implements `GroupAllGather`."""
        return True

    def start(self, *, for_backward: bool) -> None:
        """Implements `GroupAllGather`; memory is allocated on the all-gather stream."""
        streams, post_forward = self.streams, self._post_forward
        with streams.on(streams.all_gather):
            if for_backward and post_forward is not None and post_forward.is_filled:
                self._handle = post_forward.all_gather()  # its collective follows the copy
                return
            self.free_post_forward_shard()
            if self.updates is not None:
                self.updates.gather(for_backward=for_backward)
            self._buffer = self._acquire_buffer(for_backward=for_backward)
            if self.post_forward_mesh is not None and self._post_forward is None:
                self._post_forward = PostForwardShard(
                    self._buffer, self.post_forward_mesh, self._buffers
                )
            source = self._copy_in(self._buffer)
            self._handle = self._buffer.all_gather_(source, async_op=True)
            # Behind it: on one rank it is a copy on this stream, and its handle waits for nothing.
            self._copied_in = streams.record()

    def wait(self) -> None:
        """Implements `GroupAllGather`."""
        assert self._handle is not None
        assert self._buffer is not None
        self.streams.wait(self._copied_in)
        self._handle.wait()
        self._handle = self._copied_in = None
        self._copy_out(self._buffer)
        for i, param in enumerate(self._params):
            if param.unsharded_param is None:
                param.init_unsharded_param(self._unsharded_tensor(i))
            param.sync_requires_grad()

    def free(self, *, after_forward: bool, keep_storage: bool) -> None:
        """Implements `GroupAllGather`."""
        assert self._buffer is not None
        if self._post_forward is not None:
            backward_follows = after_forward and self.post_forward_mesh is not None
            self._post_forward.reshard(fill=backward_follows, keep_storage=keep_storage)
        else:
            self._buffer.release(keep_storage=keep_storage)

    def free_post_forward_shard(self) -> None:
        """Implements `GroupAllGather`."""
        if self._post_forward is not None:
            self._post_forward.free()

    def _new_buffer(self) -> DBuffer:
        """Allocates the buffer of the collective."""
        return self._buffers.full_buffer(self._dtype)

    # What `QuantizedAllGather` does otherwise.

    def _acquire_buffer(self, *, for_backward: bool) -> DBuffer:
        """Returns the buffer of the collective, allocated."""
        if self._buffer is None:
            return self._new_buffer()
        self._buffer.acquire()
        return self._buffer

    def _copy_in(self, buffer: DBuffer) -> DBuffer | None:
        """Returns the buffer to gather from; None where this rank's shard was copied in."""
        shard = self._shard
        if shard.dtype == buffer.dtype and shard.device == buffer.device:
            return shard
        buffer.copy_(shard, non_blocking=True)  # cast, or moved from the host, into place
        return None

    def _copy_out(self, buffer: DBuffer) -> None:
        """Makes the unsharded parameters, once the collective has ended."""

    def _unsharded_tensor(self, i: int) -> torch.Tensor:
        """Returns what the unsharded parameter is made of."""
        assert self._buffer is not None
        return self._buffer.view(i)


class PostForwardShard:
    """This rank's part of the parameters between forward and backward, over fewer ranks.

    It is several shards of the layout that follow each other, so it splits no block either.

    Args:
        buffer: the group's all-gather buffer, allocated.
        mesh: of two axes, the last of them of the ranks that gather in backward.
        buffers: describes the buffers of the group.

    Source: torch/distributed/fsdp/_fully_shard, ``reshard_after_forward`` as an int.
    """

    def __init__(self, buffer: DBuffer, mesh: DeviceMesh, buffers: BufferSpec) -> None:
        self._layout = merge_shards(buffer.layout, mesh.size(1))
        self._buffers, self.mesh, self.buffer = buffers, mesh, buffer
        self.shard: DBuffer | None = None  # SHARD on `mesh`, allocated while it is filled
        self._gathered: DBuffer | None = None  # FULL on `mesh`, in the memory of `buffer`
        self.is_filled = False

    def all_gather(self) -> Handle:
        """Starts to gather into the memory of the all-gather buffer, which is free.

        The stream that acquires this memory waits for its release, so `shard` is filled by then.
        """
        assert self.shard is not None
        if self._gathered is None:
            self._gathered = self._new_buffer(full=True)
        else:
            self._gathered.acquire()
        self._gathered.copy_(self.shard)
        return self._gathered.all_gather_(async_op=True)

    def reshard(self, *, fill: bool, keep_storage: bool = False) -> None:
        """Frees the all-gather buffer; before, copies this rank's post-forward shard out of it.

        Args:
            fill: whether to copy; otherwise an earlier post-forward shard is freed, too.
            keep_storage: whether the all-gather buffer's memory stays allocated.
        """
        if self._gathered is not None:
            self._gathered.release(keep_storage=keep_storage)
        if fill and self.buffer.allocated:
            if self.shard is None:
                self.shard = self._new_buffer(full=False)
            else:
                self.shard.acquire()
            begin = self.shard.rank * self._layout.shard_size
            own = self.buffer.local[begin : begin + self._layout.shard_size]
            self.shard.local.copy_(own)
            self.is_filled = True
        elif not fill:
            self.free()
        self.buffer.release(keep_storage=keep_storage)

    def free(self) -> None:
        """Frees the post-forward shard."""
        if self.shard is not None:
            self.shard.release()
        self.is_filled = False

    def _new_buffer(self, *, full: bool) -> DBuffer:
        buffers = self._buffers
        return DBuffer(
            self._layout, self.mesh, (Replicate(), Shard(0)), self.buffer.dtype, buffers.device,
            full=full, memory=self.buffer.memory if full else None, strategy=buffers.collectives,
            name=buffers.names,
        )  # fmt: skip
