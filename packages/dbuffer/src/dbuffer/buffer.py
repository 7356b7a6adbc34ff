"""DBuffer: a group of tensors in one buffer that is distributed over a mesh.

Note: the words of this package, beside those of `ragged_shard.planner`.
    buffer: flat, of one dtype; its global content has a placement on each axis of a mesh, as a
        DTensor of one dim has: Shard(0), Replicate or Partial.
    shard axis: the one along which the layout's shards lie. On it a rank has the whole buffer, or
        only its shard.
    full: a buffer with memory for all shards, whatever its placements say; then all-gather and
        reduce-scatter happen in place.
    local: what the placements say this rank has: the whole buffer or its shard. Group operators
        work on that, padding included.
    held: the memory is ours to read and write; see memory.py for what a release is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dbuffer import faults, group_ops, placing
from dbuffer.base import BufferBase
from dbuffer.collectives import Axis, Finish
from dbuffer.group_ops import Tensors
from dbuffer.handle import Handle

if TYPE_CHECKING:
    from dbuffer.report import BufferReport

__all__ = ["DBuffer"]


class DBuffer(BufferBase):
    """A group of tensors in one distributed buffer, each a view at a stable address.

    Args:
        layout: where the tensors lie; of as many shards as the shard axis has ranks.
        mesh: of any number of axes, this rank in it.
        placements: of the buffer, one per axis: ``Shard(0)`` on the shard axis, else Replicate or
            Partial of "sum" or "avg".
        dtype: of all tensors.
        device: of the memory; by default the mesh's.
        full: whether there is memory for all shards where the placements shard the buffer, so that
            `all_gather_` has room. Unsharded buffers are full.
        shard_axis: number or name; by default the axis that is sharded, else the last.
        inner: by place or name, the tensors that are placed on other axes too; see `Inner`.
        memory: a `Block` of a pool, or other memory that nobody holds; by default its own, which a
            release returns to torch's allocator.
        alignment: bytes of which the memory's begin must be a multiple.
        pin_memory: of its own memory, where that is the host's.
        strategy: "native" for the backend's collectives, "exchange" for sends between pairs of
            ranks, "auto" for the faster on the axis's backend; or `Collectives` of your own.
        name: what errors call the buffer, and what its collectives are told apart by, so the same
            on every rank; a function is asked each time. By default the layout's tensors.

    The memory is held at first, its content is anything, its padding zero.

    A collective in which a rank does not take part raises on the others, after the process group's
    time-out or when its connection ends: the backend's type of RuntimeError, naming collective,
    axis and buffer; see `faults`.

    Raises:
        ValueError: arguments that are wrong or do not go together; before any collective.

    Source: veScale-FSDP, section 5, "Distributed Buffer".
    """

    # Collectives.

    def all_gather_(self, source: DBuffer | None = None, *, async_op: bool = False) -> Handle:
        """Every rank gets every shard, in place: Shard(0) becomes Replicate on the shard axis.

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
                    f"DBuffer.all_gather_: a source of {source.dtype} on {source.device} into "
                    f"{self.dtype} on {self.device}; wants the same, or copy_() before"
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
        """What this rank has becomes the sum or mean over an axis: Partial becomes Replicate.

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
                f"DBuffer.all_reduce_: {len(summed)} axes of {self._placements} are Partial; "
                f"wants axis= to say which"
            )
        number = summed[0] if axis is None else placing.axis_index(self.mesh, axis, "axis")
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
        """Adds another buffer of the same layout and placements, cast to this dtype.

        Raises:
            ValueError: another layout, or other placements.
        """
        self._check_like("add_", other)
        if other.placements != self._placements:
            raise ValueError(
                f"DBuffer.add_: {other.placements} into {self._placements}; wants the same"
            )
        self.local.add_(other.local, alpha=alpha)

    @torch.no_grad()
    def copy_(self, other: DBuffer, *, non_blocking: bool = False) -> None:
        """Takes over another buffer's content, cast to this dtype, and its placements.

        A full buffer takes a shard to its place in the buffer, ready for `all_gather_`.

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
            tensors: of the shapes of the layout, any dtype: all in its order, with None for those
                that are missing, or some by place or name.
            scale: multiplies them, after the cast.

        Raises:
            ValueError: too few or too many, an unknown one, another shape; nothing was written.
        """
        given = self._pieces("copy_from", tensors)
        missing = [part for i, part in self._parts().items() if i not in given]
        zeros = [*missing, *group_ops.padding_of(self.layout, self._local, self._rank_of_local)]
        if zeros:
            torch._foreach_zero_(zeros)
        self._each(torch._foreach_copy_, given)
        if scale != 1.0:
            self._local.mul_(scale)

    @torch.no_grad()
    def add_from(self, tensors: Tensors, *, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times whole tensors, in one pass; those that are missing add nothing.

        Args and errors: as of `copy_from`.
        """
        given = self._pieces("add_from", tensors)
        self._each(partial(torch._foreach_add_, alpha=alpha), given)

    def report(self) -> BufferReport:
        """Its tensors, their place and bytes; as a table with `str`, as a picture with `svg`."""
        from dbuffer.report import report

        return report(self)

    def _pieces(self, what: str, tensors: Tensors) -> dict[int, torch.Tensor]:
        """What this rank keeps of whole tensors, shaped as `_parts`."""
        self._check(what)
        given = group_ops.by_index(self.layout, tensors, what)
        return group_ops.pieces_of(self.layout, given, self._rank_of_local)

    def _parts(self) -> dict[int, torch.Tensor]:
        """What this rank has of each tensor."""
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
        mine, theirs = (self.mesh, self.shard_axis), (other.mesh, other.shard_axis)
        if other.layout != self.layout or theirs != mine:
            raise ValueError(
                f"DBuffer.{what}: {other!r} has another layout, mesh or shard axis than {self!r}; "
                f"wants the same"
            )

    def _average(self, what: str, number: int) -> bool:
        """Whether an axis is Partial by its mean."""
        placement = self._placements[number]
        if not isinstance(placement, Partial):
            raise RuntimeError(self._wrong(what, number, "Partial"))
        return placement.reduce_op == "avg"

    def _wrong(self, what: str, number: int, wanted: str) -> str:
        return (
            f"DBuffer.{what}: {self._placements[number]!r} on axis {self._axes[number].name}, "
            f"wants {wanted}; set_placements() says what the content is"
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
            with faults.named(doing, axis):
                if self._checks:
                    faults.compare(doing(), axis, self.mesh.device_type)
                finish = start(axis)

        def land() -> None:
            if finish is not None:
                with faults.named(doing, axis):
                    finish()
            self._in_flight, self._placements = None, tuple(placements)

        self._in_flight = handle = Handle(land, doing)
        if not async_op:
            handle.wait()
        return handle
