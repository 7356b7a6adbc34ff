"""What a buffer is, which tensors are in it, and who has its memory; buffer.py does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dbuffer import _compat, faults, placing, views
from dbuffer.checking import checked, checked_memory
from dbuffer.collectives import Axis, Collectives, Strategy, axis_of, collectives_for
from dbuffer.group_ops import index_of, padding_of
from dbuffer.handle import Handle
from dbuffer.memory import Memory
from dbuffer.placing import Inner, Placements, is_sharded
from ragged_shard.planner import Layout

__all__ = ["BufferBase"]


class BufferBase:
    """The part of `DBuffer` that neither sends nor computes; see there for the arguments."""

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        full: bool = False,
        shard_axis: int | str | None = None,
        inner: Mapping[int | str, Inner] | None = None,
        memory: Memory | None = None,
        alignment: int = 16,
        pin_memory: bool = False,
        strategy: Strategy | Collectives = "auto",
        name: str | Callable[[], str] = "",
    ) -> None:
        given = checked(layout, mesh, placements, dtype, device, shard_axis, inner)
        self.layout, self.mesh, self.dtype = layout, mesh, dtype
        self.device, self.shard_axis, self.inner = given.device, given.shard_axis, given.inner
        self._placements = self._initial = given.placements
        self._axes = [axis_of(mesh, axis) for axis in range(mesh.ndim)]
        self._collectives = [collectives_for(strategy, axis, self.device) for axis in self._axes]
        self.full = full or not is_sharded(self._placements[self.shard_axis])
        numel = layout.buffer_size if self.full else layout.shard_size
        nbytes = numel * dtype.itemsize
        self.memory = checked_memory(
            memory, nbytes, self.device, alignment, dtype.itemsize, pin_memory=pin_memory
        )
        self._held = True  # the memory may also be held by another buffer, that has it in turn
        self._in_flight: Handle | None = None
        self._name, self._tagged, self._checks = name, "", faults.checks()
        begin = self.rank * layout.shard_size if self.full else 0
        # (buffer_size or shard_size,) and (shard_size,), dtype, on the memory's storage
        self._flat = views.tensor_in(self.memory.bytes, dtype, 0, (numel,))
        self._shard = views.tensor_in(self.memory.bytes, dtype, begin, (layout.shard_size,))
        self._views: dict[int, torch.Tensor] = {}
        self._shards: dict[int, torch.Tensor] = {}
        self._dtensors: dict[tuple[int, Placements], DTensor] = {}
        zeros = padding_of(layout, self._flat, None if self.full else self.rank)
        if zeros:
            torch._foreach_zero_(zeros)

    # What it is.

    @property
    def placements(self) -> Placements:
        """Of what is in it now; collectives change them."""
        return self._placements

    @property
    def name(self) -> str:
        """What errors call it, and what its collectives are told apart by."""
        name = self._name if isinstance(self._name, str) else self._name()
        return name or faults.names_of(self.layout)

    @property
    def collectives(self) -> str:
        """The kinds of its collectives, one for each axis."""
        return ", ".join(type(one).__name__ for one in self._collectives)

    @property
    def rank(self) -> int:
        """Which of the layout's shards is this rank's."""
        return self._axes[self.shard_axis].position

    @property
    def sharded(self) -> bool:
        """Whether only this rank's shard is valid now."""
        return is_sharded(self._placements[self.shard_axis])

    @property
    def held(self) -> bool:
        """Whether its memory may be read and written."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, while it is held."""
        return self._flat.numel() * self.dtype.itemsize

    @property
    def local(self) -> torch.Tensor:
        """What this rank has, flat: ``(shard_size,)`` where it is sharded, else the whole."""
        self._check("local")
        return self._local

    def __repr__(self) -> str:
        state = "held" if self.held else "released"
        return (
            f"DBuffer({len(self.layout.specs)} tensors, {self.layout.buffer_size} elements of "
            f"{self.dtype} on {self.device}, {self._placements} on {self.mesh}, {state})"
        )

    # Its tensors.

    def view(self, i: int | str) -> torch.Tensor:
        """The whole tensor `i`, in the buffer: always the same object, at the same address.

        A full buffer has it in every state; where it is sharded only this rank's part is valid.
        After a release and an acquire the object is valid again, and so is what autograd saved
        of it, once the content is back: writes of this class do not change its version.

        Args:
            i: place or name.

        Raises:
            ValueError: no such tensor.
            RuntimeError: the buffer has no room for it, or was released.
        """
        i = index_of(self.layout, i)
        self._check_held("view")
        self._check_full("view")
        if i not in self._views:
            shape = views.tensor_shape(self.layout, i)
            start = self.layout.starts[i]
            self._views[i] = views.tensor_in(self.memory.bytes, self.dtype, start, shape)
        return self._views[i]

    def shard(self, i: int | str) -> torch.Tensor:
        """This rank's part of tensor `i` under its shard, in the buffer; the same object always.

        Its shape is that of a RaggedShard's local tensor: some rows, or a flat run.

        Args:
            i: place or name.

        Raises:
            ValueError: no such tensor.
            RuntimeError: the buffer was released.
        """
        i = index_of(self.layout, i)
        self._check_held("shard")
        if i not in self._shards:
            shape = views.local_shape(self.layout, i, self.rank)
            first = self.layout.starts[i] + self.layout.part(i, self.rank).start
            begin = 0 if self.full else self.rank * self.layout.shard_size
            start = first - begin if self.layout.part(i, self.rank).size else 0
            self._shards[i] = views.tensor_in(self.memory.bytes, self.dtype, start, shape)
        return self._shards[i]

    def dtensor(self, i: int | str) -> DTensor:
        """Tensor `i` as a DTensor whose local tensor lies in the buffer, placed as the buffer is.

        Shard(0) becomes the RaggedShard of the layout, or a StridedRaggedShard where an inner axis
        shards dim 0. For each placement of the buffer it is the same object always.

        Args:
            i: place or name.

        Raises:
            ValueError: no such tensor; placements that do not fit it (ragged_shard says how).
            RuntimeError: the buffer was released.
        """
        i = index_of(self.layout, i)
        self._check("dtensor")
        key = (i, self._placements)
        if key not in self._dtensors:
            local = self.shard(i) if self.sharded else self.view(i)
            inner = self.inner.get(i)
            shape = views.tensor_shape(self.layout, i) if inner is None else inner.shape
            ragged = views.ragged_shard(self.layout, i)
            placed = placing.of_tensor(ragged, self.mesh, self._placements, inner)
            mesh = self.mesh if inner is None else inner.mesh
            self._dtensors[key] = _compat.dtensor(
                local, mesh, placed, shape, views.contiguous_stride(shape)
            )
        return self._dtensors[key]

    # Memory and state.

    def acquire(self) -> None:
        """Holds the memory again after a release; the content is anything, the tensors the same.

        The placements are those that the buffer was made with.
        """
        if not self.held:
            self.memory.acquire()
            self._held = True
            self._placements = self._initial

    def release(self) -> None:
        """Gives the memory away: to torch's allocator, or to others who share its block.

        Call it on the stream that used the buffer last. Tensors keep their identity, and must not
        be read until it is acquired again.

        Raises:
            RuntimeError: a collective is in flight.
        """
        if self.held:
            self._check("release")
            self.memory.release()
            self._held = False

    def set_placements(self, placements: Sequence[Placement]) -> None:
        """Says what the content now is; nothing moves.

        Raises:
            ValueError: placements that it cannot have.
            RuntimeError: no room for them, released, in flight.
        """
        placements = placing.checked(placements, self.mesh, self.shard_axis)
        self._check("set_placements")
        if not is_sharded(placements[self.shard_axis]):
            self._check_full("set_placements")
        self._placements = placements

    @property
    def _local(self) -> torch.Tensor:
        return self._shard if self.sharded else self._flat

    def _axis(self, number: int) -> Axis:
        """An axis, tagged by the buffer's name."""
        name = self.name
        if name != self._tagged:
            tag = faults.tag_of(name, self.layout.shard_size, self.dtype)
            self._axes, self._tagged = [replace(axis, tag=tag) for axis in self._axes], name
        return self._axes[number]

    def _check(self, what: str) -> None:
        """Raises where the content must not be touched."""
        self._check_held(what)
        if self._in_flight is not None:
            raise RuntimeError(
                f"DBuffer.{what}: a collective is in flight; call wait() of its handle first"
            )

    def _check_held(self, what: str) -> None:
        if not self.held:
            raise RuntimeError(
                f"DBuffer.{what}: the buffer is released; call acquire() and fill it first"
            )

    def _check_full(self, what: str) -> None:
        if not self.full:
            raise RuntimeError(
                f"DBuffer.{what}: the buffer has memory for its shard of "
                f"{self.layout.shard_size} elements only, and this wants all "
                f"{self.layout.buffer_size}; make it with full=True"
            )
