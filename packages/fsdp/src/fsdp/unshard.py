"""The gather of a planned group: one all-gather into the buffer, no copy in or out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbuffer import DBuffer, Handle
from fsdp.kept import Keeper

if TYPE_CHECKING:
    from fsdp.planned import PlannedGroup

__all__ = ["Gatherer"]


class Gatherer:
    """A group's FULL buffer, and the gather that fills it.

    Args:
        group: whose SHARD buffer it gathers.
    """

    def __init__(self, group: PlannedGroup) -> None:
        self._group = group
        self._buffer: DBuffer | None = None  # FULL: compute dtype, all shards, ours
        self._handle: Handle | None = None
        self._copied: Any = None  # event: the own shard is in the buffer
        self._keeper: Keeper | None = None  # where fewer ranks gather in backward
        self._free: Any = None  # event: compute is done with memory that stays

    @property
    def under_way(self) -> bool:
        """Whether a gather was started and not finished."""
        return self._handle is not None

    def start(self, *, for_backward: bool) -> None:
        """Issues the gather; the memory is that of the stream that gathers."""
        group = self._group
        with group.streams.on(group.streams.gather):
            if for_backward and self._keeper is not None and self._keeper.has:
                self._handle = self._keeper.gather()
                self._copied = group.streams.record()
                return
            self.forget_kept()
            if self._buffer is None:
                self._buffer = self._new_buffer()
                if group.backward_mesh is not None:
                    self._keeper = Keeper(group, self._buffer, group.backward_mesh)
            else:
                self._buffer.acquire()
            group.streams.wait(self._free)
            source = self._fill(self._buffer)
            self._copied = group.streams.record()
            self._handle = self._buffer.all_gather_(source, async_op=True)

    def finish(self) -> None:
        """Makes the current stream wait for it; the unsharded parameters are valid then."""
        assert self._handle is not None
        assert self._buffer is not None
        self._group.streams.wait(self._copied)
        self._handle.wait()
        self._handle = self._copied = None
        whole = self._arrived(self._buffer)
        for i, param in enumerate(self._group.params):
            if param.unsharded is None:
                param.make_unsharded(whole.view(i))
            param.follow()

    def release(self, *, after_forward: bool) -> None:
        """Gives the memory back, after what the current stream has been given to do."""
        assert self._buffer is not None
        group, keeper = self._group, self._keeper
        if keeper is not None and (keeper.in_use or not group.keeps_memory):
            keeper.release(keep=after_forward and group.backward_mesh is not None)
        elif not group.keeps_memory:
            self._buffer.release()
        else:
            self._free = group.streams.record()

    def forget_kept(self) -> None:
        """Lets go of what forward has kept for backward."""
        if self._keeper is not None:
            self._keeper.forget()

    # What is gathered.

    def _new_buffer(self) -> DBuffer:
        """That of the collective."""
        return self._group.new_buffer(self._group.compute_dtype)

    def _fill(self, buffer: DBuffer) -> DBuffer | None:
        """What to gather into the buffer; None where this rank's shard is in it by now."""
        shard = self._group.shard
        if shard.dtype == buffer.dtype and shard.device == buffer.device:
            return shard
        buffer.copy_(shard, non_blocking=True)  # cast, or moved, into place
        return None

    def _arrived(self, buffer: DBuffer) -> DBuffer:
        """That of the unsharded parameters, once the collective has ended."""
        return buffer
