"""The gather of a group: one cast into the buffer, one all-gather in place, no copy out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbuffer import DBuffer, Handle

if TYPE_CHECKING:
    from fsdp.group import Group

__all__ = ["Gatherer"]


class Gatherer:
    """A group's FULL buffer, and the gather that fills it.

    Args:
        group: whose SHARD buffer it gathers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffer: DBuffer | None = None  # FULL: compute dtype, all shards, ours
        self._handle: Handle | None = None
        self._copied: Any = None  # event: the own shard is in the buffer

    @property
    def under_way(self) -> bool:
        """Whether a gather was started and not finished."""
        return self._handle is not None

    def start(self) -> None:
        """Issues the gather; the memory is that of the stream that gathers."""
        group = self._group
        group.check_ready()
        with group.streams.on(group.streams.gather):
            if self._buffer is None:
                self._buffer = group.new_buffer(group.compute_dtype)
            else:
                self._buffer.acquire()
            self._buffer.copy_(group.shard, non_blocking=True)
            self._copied = group.streams.record()
            self._handle = self._buffer.all_gather_(async_op=True)

    def finish(self) -> None:
        """Makes the current stream wait for it; the unsharded parameters are valid then."""
        assert self._handle is not None
        assert self._buffer is not None
        self._group.streams.wait(self._copied)
        self._handle.wait()
        self._handle = self._copied = None
        for i, param in enumerate(self._group.params):
            param.make_unsharded(self._buffer.view(i))

    def release(self) -> None:
        """Gives the memory back, after what the current stream has been given to do."""
        if self._buffer is not None:
            self._buffer.release()
