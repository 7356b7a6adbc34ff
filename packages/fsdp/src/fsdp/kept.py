"""What is kept between forward and backward so that fewer ranks have to gather: larger shards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from dbuffer import DBuffer, Handle

if TYPE_CHECKING:
    from fsdp.planned import PlannedGroup

__all__ = ["Keeper"]


class Keeper:
    """Cuts a gathered buffer into fewer, larger shards, over ranks that are near each other.

    Each shard is some of the layout's, one behind the other, so it cuts no block either.

    Args:
        group: whose parameters they are.
        full: the group's FULL buffer, held.
        mesh: of two axes, the last of them of the ranks that gather in backward.

    Source: torch/distributed/fsdp/_fully_shard, ``reshard_after_forward`` as an int.
    """

    def __init__(self, group: PlannedGroup, full: DBuffer, mesh: DeviceMesh) -> None:
        size = mesh.size(1)
        shard_size = full.layout.buffer_size // size
        self._layout = replace(
            full.layout, world_size=size, shard_size=shard_size, proved_lower_bound=0, exact=False
        )
        self._group, self._mesh, self._full = group, mesh, full
        self._near: DBuffer | None = None  # SHARD on `mesh`, ours, held while there is something
        self._wide: DBuffer | None = None  # FULL on `mesh`, in the memory of `full`
        self._kept_at: Any = None  # event: `_near` is filled
        self.has = False

    @property
    def in_use(self) -> bool:
        """Whether what was gathered is of what was kept."""
        return self._wide is not None and self._wide.allocated

    def gather(self) -> Handle:
        """Starts to gather what was kept into the FULL buffer's memory, which nobody holds."""
        assert self._near is not None
        if self._wide is None:
            self._wide = self._buffer(full=True)
        else:
            self._wide.acquire()
        self._group.streams.wait(self._kept_at)
        self._wide.copy_(self._near)
        return self._wide.all_gather_(async_op=True)

    def release(self, *, keep: bool) -> None:
        """Gives the FULL buffer's memory back; keeps this rank's larger shard of it, or nothing."""
        if self._wide is not None:
            self._wide.release()
        if keep and self._full.allocated:
            if self._near is None:
                self._near = self._buffer(full=False)
            else:
                self._near.acquire()
            begin = self._near.rank * self._layout.shard_size
            mine = self._full.local[begin : begin + self._layout.shard_size]
            self._near.local.copy_(mine)
            self._kept_at = self._group.streams.record()
            self.has = True
        elif not keep:
            self.forget()
        self._full.release()

    def forget(self) -> None:
        """Lets go of what was kept."""
        if self._near is not None:
            self._near.release()
        self.has = False

    def _buffer(self, *, full: bool) -> DBuffer:
        group = self._group
        return DBuffer(
            self._layout, self._mesh, (Replicate(), Shard(0)), self._full.dtype, group.device,
            full=full, memory=self._full.memory if full else None, strategy=group.comms,
            name=lambda: group.names,
        )  # fmt: skip
