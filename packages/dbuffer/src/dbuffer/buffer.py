"""DBuffer: a group of tensors in one buffer that is distributed over a mesh.

Note: the terms of this package, beside those of `ragged_shard.planner`.
    buffer: flat, of one dtype; its global content has a placement on each axis of a mesh, as a
        DTensor of one dim has: Shard(0), Replicate or Partial.
    shard axis: the one that the layout's shards are placed on. On it a rank has the whole buffer,
        or only its shard.
    full: a buffer with memory for all shards, whatever its placements say; then all-gather and
        reduce-scatter happen in place.
    local: what the placements say this rank has: the whole buffer or its shard. Group operators
        work on that, padding included.
    allocated: the memory may be read and written; see memory.py for what a release is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dbuffer import _compat, errors, tensor_lookup, views
from dbuffer.arguments import checked, checked_memory
from dbuffer.collectives import (
    Axis,
    Collectives,
    Finish,
    Handle,
    Strategy,
    axis_of,
    collectives_for,
)
from dbuffer.memory import BufferMemory
from dbuffer.placements import (
    Inner,
    Placements,
    axis_index,
    checked_placements,
    is_sharded,
    of_tensor,
)
from dbuffer.report import BufferReport, tensor_reports
from dbuffer.tensor_lookup import Tensors, index_of, padding_of
from ragged_shard import RaggedShard
from ragged_shard.planner import Layout

__all__ = ["DBuffer"]


class DBuffer:
    """A group of tensors in one distributed buffer, each a view at a stable address.

    Args:
        layout: places the tensors; of as many shards as the shard axis has ranks.
        mesh: of any number of axes, this rank in it.
        placements: of the buffer, one per axis: ``Shard(0)`` on the shard axis, else Replicate or
            Partial of "sum" or "avg".
        dtype: of all tensors.
        device: of the memory; by default the mesh's.
        full: whether there is memory for all shards where the placements shard the buffer, so that
            `all_gather_` has room. Unsharded buffers are full.
        shard_axis: number or name; by default the axis that is sharded, else the last.
        inner: by place or name, the tensors that are placed on other axes too; see `Inner`.
        memory: a `PoolBlock`, or other memory that no buffer uses; by default the buffer's own,
            which a release returns to torch's allocator.
        alignment: bytes of which the memory's begin must be a multiple.
        pin_memory: of its own memory, where that is the host's.
        strategy: "native" for the backend's collectives, "exchange" for sends between pairs of
            ranks, "auto" for the faster on the axis's backend; or `Collectives` of your own.
        name: what errors call the buffer, and what distinguishes its collectives, so the same
            on every rank; a function is asked each time. By default the layout's tensors.

    The memory is allocated at first and not initialised, except for the padding, which is zero.

    A collective in which a rank does not take part raises on the others, after the process group's
    time-out or when its connection ends: the backend's type of RuntimeError, naming collective,
    axis and buffer; see `errors`.

    Raises:
        ValueError: arguments that are wrong or do not go together; before any collective.

    Source: veScale-FSDP, section 5, "Distributed Buffer".
    """

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
        memory: BufferMemory | None = None,
        alignment: int = 16,
        pin_memory: bool = False,
        strategy: Strategy | Collectives = "auto",
        name: str | Callable[[], str] = "",
    ) -> None:
        given = checked(layout, mesh, placements, dtype, device, shard_axis, inner)
        self.layout, self.mesh, self.dtype = layout, mesh, dtype
        self.device, self.shard_axis, self.inner = given.device, given.shard_axis, given.inner
        self._tensors = given.tensors  # this rank's, whole along the buffer's axes
        self._placements = self._initial = given.placements
        self._axes = [axis_of(mesh, axis) for axis in range(mesh.ndim)]
        self._collectives = [collectives_for(strategy, axis, self.device) for axis in self._axes]
        self.full = full or not is_sharded(self._placements[self.shard_axis])
        numel = layout.buffer_size if self.full else layout.shard_size
        nbytes = numel * dtype.itemsize
        self.memory = checked_memory(
            memory, nbytes, self.device, alignment, dtype.itemsize, pin_memory=pin_memory
        )
        self._allocated = True  # the memory may also be used by another buffer, in turns
        self._in_flight: Handle | None = None
        self._name, self._tagged, self._checks = name, "", errors.checks()
        begin = self.rank * layout.shard_size if self.full else 0
        # (buffer_size or shard_size,) and (shard_size,), dtype, on the memory's storage
        self._flat = views.tensor_in(self.memory.bytes, dtype, 0, (numel,))
        self._shard = views.tensor_in(self.memory.bytes, dtype, begin, (layout.shard_size,))
        self._views: dict[int, torch.Tensor] = {}
        self._shards: dict[int, torch.Tensor] = {}
        self._dtensors: dict[tuple[int, Placements], DTensor] = {}
        zeros = padding_of(layout, self._tensors, self._flat, None if self.full else self.rank)
        if zeros:
            torch._foreach_zero_(zeros)

    # What it is.

    @property
    def placements(self) -> Placements:
        """Of what is in it now; collectives change them."""
        return self._placements

    @property
    def name(self) -> str:
        """What errors call it, and what distinguishes its collectives."""
        name = self._name if isinstance(self._name, str) else self._name()
        return name or errors.names_of(self.layout)

    @property
    def collectives(self) -> str:
        """The kinds of its collectives, one for each axis."""
        return ", ".join(type(collective).__name__ for collective in self._collectives)

    @property
    def rank(self) -> int:
        """Which of the layout's shards is this rank's."""
        return self._axes[self.shard_axis].position

    @property
    def sharded(self) -> bool:
        """Whether only this rank's shard is valid now."""
        return is_sharded(self._placements[self.shard_axis])

    @property
    def allocated(self) -> bool:
        """Whether its memory may be read and written."""
        return self._allocated

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, while it is allocated."""
        return self._flat.numel() * self.dtype.itemsize

    @property
    def local(self) -> torch.Tensor:
        """What this rank has, flat: ``(shard_size,)`` where it is sharded, else the whole."""
        self._check("local")
        return self._local

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "released"
        return (
            f"DBuffer({len(self.layout.specs)} tensors, {self.layout.buffer_size} elements of "
            f"{self.dtype} on {self.device}, {self._placements} on {self.mesh}, {state})"
        )

    # Its tensors.

    def view(self, i: int | str) -> torch.Tensor:
        """Returns tensor `i` as a view of the buffer: always the same object and address.

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
        self._check_allocated("view")
        self._check_full("view")
        if i not in self._views:
            start, shape = self.layout.starts[i], self._tensors[i].shape
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
        self._check_allocated("shard")
        if i not in self._shards:
            shape = self._ragged_shard(i).local_shape(self._tensors[i].shape, self.rank)
            first = self.layout.starts[i] + self.layout.part(i, self.rank).start
            begin = 0 if self.full else self.rank * self.layout.shard_size
            start = first - begin if self.layout.part(i, self.rank).size else 0
            self._shards[i] = views.tensor_in(self.memory.bytes, self.dtype, start, shape)
        return self._shards[i]

    def dtensor(self, i: int | str) -> DTensor:
        """Returns tensor `i` as a DTensor whose local tensor is a view of the buffer.

        Its placements are the buffer's: Shard(0) becomes the RaggedShard of the layout, or a
        StridedRaggedShard where an inner axis shards dim 0. For each placement of the buffer it is
        the same object always.

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
            shape = self._tensors[i].shape if inner is None else inner.shape
            placed = of_tensor(self._ragged_shard(i), self.mesh, self._placements, inner)
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
        if not self.allocated:
            self.memory.acquire()
            self._allocated = True
            self._placements = self._initial

    def release(self, *, keep_storage: bool = False) -> None:
        """Gives the memory away: to torch's allocator, or to others who share its block.

        Call it on the stream that used the buffer last. Tensors keep their identity, and must not
        be read until it is acquired again.

        Args:
            keep_storage: whether memory of its own stays allocated, so that addresses stay.

        Raises:
            RuntimeError: a collective is in flight.
        """
        if self.allocated:
            self._check("release")
            self.memory.release(keep_storage=keep_storage)
            self._allocated = False

    def set_placements(self, placements: Sequence[Placement]) -> None:
        """Says what the content now is; nothing moves.

        Raises:
            ValueError: placements that it cannot have.
            RuntimeError: no room for them, released, in flight.
        """
        placements = checked_placements(placements, self.mesh, self.shard_axis)
        self._check("set_placements")
        if not is_sharded(placements[self.shard_axis]):
            self._check_full("set_placements")
        self._placements = placements

    # Collectives.

    def all_gather_(self, source: DBuffer | None = None, *, async_op: bool = False) -> Handle:
        """Gathers the shards in place: Shard(0) becomes Replicate on the shard axis.

        Args:
            source: whose shards are gathered into this buffer, of the same layout, mesh, dtype and
                device: what a copy of its shard to its place here would do before, without it
                where the backend sends from elsewhere. By default this buffer's own.
            async_op: see `Handle`.

        Raises:
            ValueError: a source of another layout, mesh, dtype or device.
            RuntimeError: it is not sharded, has no room, was released, or is in flight.
        """
        axis = self.shard_axis
        self._check("all_gather_")
        if source is not None:
            self._check_like("all_gather_", source)
            if (source.dtype, source.device) != (self.dtype, self.device):
                raise ValueError(
                    f"DBuffer.all_gather_: expected a source of {self.dtype} on {self.device}, got "
                    f"{source.dtype} on {source.device}; call copy_() first"
                )
            self._placements = source.placements
        if not self.sharded:
            raise RuntimeError(self._wrong("all_gather_", axis, "Shard(0)"))
        self._check_full("all_gather_")
        how, own = self._collectives[axis], self._shard if source is None else source.local
        if self._axes[axis].size == 1 and source is not None:
            self._shard.copy_(own)  # nothing is sent
        return self._run(
            "all_gather",
            lambda on: how.all_gather(self._flat, on, own),
            axis,
            Replicate(),
            async_op,
        )

    def reduce_scatter_(self, *, async_op: bool = False) -> Handle:
        """This rank's shard becomes the sum or mean, in place: Partial becomes Shard(0).

        The other shards' memory is anything afterwards.

        Raises:
            RuntimeError: it is not Partial on the shard axis, was released, or is in flight.
        """
        axis = self.shard_axis
        self._check("reduce_scatter_")
        average = self._average("reduce_scatter_", axis)
        how = self._collectives[axis]
        return self._run(
            "reduce_scatter", lambda on: how.reduce_scatter(self._flat, on, average=average),
            axis, Shard(0), async_op,
        )  # fmt: skip

    def all_reduce_(self, axis: int | str | None = None, *, async_op: bool = False) -> Handle:
        """Sums or averages over an axis in place: Partial becomes Replicate.

        Where the buffer is sharded on the shard axis, only the shard is sent.

        Args:
            axis: number or name; by default the only one that is Partial.
            async_op: see `Handle`.

        Raises:
            ValueError: no such axis.
            RuntimeError: it is not Partial there, was released, or is in flight.
        """
        summed = [a for a, p in enumerate(self._placements) if isinstance(p, Partial)]
        if axis is None and len(summed) != 1:
            raise RuntimeError(
                f"DBuffer.all_reduce_: expected one Partial axis, got {len(summed)} in "
                f"{self._placements}; name the axis with axis="
            )
        number = summed[0] if axis is None else axis_index(self.mesh, axis, "axis")
        self._check("all_reduce_")
        average, how = self._average("all_reduce_", number), self._collectives[number]
        local = self._local
        return self._run(
            "all_reduce", lambda on: how.all_reduce(local, on, average=average),
            number, Replicate(), async_op,
        )  # fmt: skip

    # Group operators: one kernel over what this rank has.

    @torch.no_grad()
    def zero_(self) -> None:
        """Fills what this rank has with zeros."""
        self.local.zero_()

    @torch.no_grad()
    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiplies what this rank has."""
        self.local.mul_(factor)

    @torch.no_grad()
    def add_(self, other: DBuffer, *, alpha: float = 1.0) -> None:
        """Adds another buffer, cast to this dtype.

        Args:
            other: of the same layout and placements.
            alpha: factor of the other buffer.

        Raises:
            ValueError: another layout, or other placements.
        """
        self._check_like("add_", other)
        if other.placements != self._placements:
            raise ValueError(
                f"DBuffer.add_: expected a buffer with the placements {self._placements}, got "
                f"{other.placements}; redistribute it first"
            )
        self.local.add_(other.local, alpha=alpha)

    @torch.no_grad()
    def copy_(self, other: DBuffer, *, non_blocking: bool = False) -> None:
        """Copies another buffer's content, cast to this dtype, and takes its placements.

        A full buffer copies a shard to its place in the buffer, ready for `all_gather_`.

        Args:
            other: of the same layout.
            non_blocking: as in `torch.Tensor.copy_`.

        Raises:
            ValueError: another layout; a whole buffer where there is room for a shard only.
        """
        self._check_like("copy_", other)
        if not other.sharded:
            self._check_full("copy_")
        into = self._shard if other.sharded else self._flat
        into.copy_(other.local, non_blocking=non_blocking)
        self._placements = other.placements

    @torch.no_grad()
    def copy_from(self, tensors: Tensors, *, scale: float = 1.0) -> None:
        """Fills what this rank has from whole tensors, in one pass; those that are missing are 0.

        Args:
            tensors: of the shapes of `view`, any dtype: all in the layout's order, with None for
                those that are missing, or some by place or name.
            scale: multiplies them, after the cast.

        Raises:
            ValueError: too few or too many, an unknown one, another shape; nothing was written.
        """
        given = self._pieces("copy_from", tensors)
        missing = [part for i, part in self._parts().items() if i not in given]
        local, rank = self._local, self._rank_of_local
        zeros = [*missing, *padding_of(self.layout, self._tensors, local, rank)]
        if zeros:
            torch._foreach_zero_(zeros)
        self._each(torch._foreach_copy_, given)
        if scale != 1.0:
            self._local.mul_(scale)

    @torch.no_grad()
    def add_from(self, tensors: Tensors, *, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times whole tensors, in one pass; errors are those of `copy_from`.

        Args:
            tensors: as in `copy_from`; those that are missing add nothing.
            alpha: factor of the tensors.
        """
        given = self._pieces("add_from", tensors)
        self._each(partial(torch._foreach_add_, alpha=alpha), given)

    def report(self) -> BufferReport:
        """Its tensors, their place and bytes; as a table with `str`, as a picture with `svg`."""
        return BufferReport(
            self.layout,
            tensor_reports(self.layout, self._tensors, self.rank, self.dtype),
            self.rank,
            self.dtype,
            self.device,
            self._placements,
            self.allocated,
            self.nbytes,
        )

    def _pieces(self, what: str, tensors: Tensors) -> dict[int, torch.Tensor]:
        """Returns this rank's parts of full tensors, with the shapes of `_parts`."""
        self._check(what)
        given = tensor_lookup.by_index(self.layout, self._tensors, tensors, what)
        return tensor_lookup.pieces_of(self.layout, given, self._rank_of_local)

    def _ragged_shard(self, i: int) -> RaggedShard:
        """Returns the placement of a tensor on the shard axis where the buffer is sharded."""
        return views.ragged_shard(self.layout, i, bases_differ=self._tensors[i].bases_differ)

    def _parts(self) -> dict[int, torch.Tensor]:
        """Returns this rank's part of each tensor."""
        part = self.shard if self.sharded else self.view
        return {i: part(i) for i in range(len(self.layout.specs))}

    @property
    def _rank_of_local(self) -> int | None:
        return self.rank if self.sharded else None

    def _each(self, operator: Callable[..., object], pieces: dict[int, torch.Tensor]) -> None:
        if pieces:
            parts = self._parts()
            targets = [parts[i].view(piece.shape) for i, piece in pieces.items()]
            operator(targets, list(pieces.values()))

    def _check_like(self, what: str, other: DBuffer) -> None:
        self._check(what)
        other._check(what)
        expected = (self.layout, self.mesh, self.shard_axis)
        if (other.layout, other.mesh, other.shard_axis) != expected:
            raise ValueError(
                f"DBuffer.{what}: expected a buffer with the layout, mesh and shard axis of "
                f"{self!r}, got {other!r}; construct both from the same layout and mesh"
            )

    def _average(self, what: str, number: int) -> bool:
        """Whether an axis is Partial by its mean."""
        placement = self._placements[number]
        if not isinstance(placement, Partial):
            raise RuntimeError(self._wrong(what, number, "Partial"))
        return placement.reduce_op == "avg"

    def _wrong(self, what: str, number: int, wanted: str) -> str:
        return (
            f"DBuffer.{what}: expected {wanted} on axis {self._axes[number].name}, got "
            f"{self._placements[number]!r}; declare what the content is by set_placements()"
        )

    def _run(
        self, what: str, start: Callable[[Axis], Finish], number: int, after: Placement,
        async_op: bool,
    ) -> Handle:  # fmt: skip
        """Starts a collective, unless nobody else is on the axis, and says what comes of it."""
        axis, placements = self._axis(number), list(self._placements)
        placements[number] = after
        alone = axis.size == 1 or not self.layout.shard_size

        def doing() -> str:
            elements = f"{self.layout.buffer_size} elements of {self.dtype}"
            return f"DBuffer: {what} of {self.name} ({elements})"

        finish: Finish | None = None
        if not alone:
            with errors.collective_errors(doing, axis):
                if self._checks:
                    errors.compare(doing(), axis, self.mesh.device_type)
                finish = start(axis)

        def finish_collective() -> None:
            if finish is not None:
                with errors.collective_errors(doing, axis):
                    finish()
            self._in_flight, self._placements = None, tuple(placements)

        self._in_flight = handle = Handle(finish_collective, doing)
        if not async_op:
            handle.wait()
        return handle

    @property
    def _local(self) -> torch.Tensor:
        return self._shard if self.sharded else self._flat

    def _axis(self, number: int) -> Axis:
        """Returns an axis, tagged with the buffer's name."""
        name = self.name
        if name != self._tagged:
            tag = errors.tag_of(name, self.layout.shard_size, self.dtype)
            self._axes, self._tagged = [replace(axis, tag=tag) for axis in self._axes], name
        return self._axes[number]

    def _check(self, what: str) -> None:
        """Raises where the content must not be touched."""
        self._check_allocated(what)
        if self._in_flight is not None:
            raise RuntimeError(
                f"DBuffer.{what}: expected no collective in flight, got one; call wait() of its "
                f"handle"
            )

    def _check_allocated(self, what: str) -> None:
        if not self.allocated:
            raise RuntimeError(
                f"DBuffer.{what}: expected an allocated buffer, got a released one; call acquire() "
                f"and fill it first"
            )

    def _check_full(self, what: str) -> None:
        if not self.full:
            raise RuntimeError(
                f"DBuffer.{what}: expected memory for all {self.layout.buffer_size} elements, got "
                f"memory for the shard of {self.layout.shard_size}; construct it with full=True"
            )
