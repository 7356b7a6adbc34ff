"""The gather of a group with quantised parameters: codes and scales, in one all-gather."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Replicate

from dbuffer import DBuffer
from fsdp.meshes import sharded_placements
from fsdp.quantized.tiles import Quantized, dequantize_into, quantize
from fsdp.quantized.wire import Form, Piece, wire_of
from fsdp.unshard import Gatherer

if TYPE_CHECKING:
    from fsdp.planned import PlannedGroup

__all__ = ["TileGatherer"]


@dataclass(frozen=True, eq=False)
class _Sent:
    """A piece where it lies among the bytes that are gathered.

    Attributes:
        piece: what it is.
        form: of its parameter.
        content: (numel,) elements, or codes (m, R, C) and scales (m, strips, tiles of a strip).
    """

    piece: Piece
    form: Form
    content: torch.Tensor | Quantized


class TileGatherer(Gatherer):
    """Quantises this rank's tiles, gathers the bytes, and makes the unsharded parameters of them.

    No rank boundary cuts a tile, so scales need no other rank. What comes out is what modules
    compute with; a kernel that multiplies by codes and scales would take them before `_arrived`
    does.

    Args:
        group: whose SHARD buffer it gathers.
    """

    def __init__(self, group: PlannedGroup) -> None:
        super().__init__(group)
        shapes = [spec.shape or () for spec in group.layout.specs]
        self._forms = [
            Form(group.compute_dtype, shape, param.tiles)
            for shape, param in zip(shapes, group.params, strict=True)
        ]
        self._sent: list[_Sent] = []  # by all ranks; made with the buffer
        self._whole: DBuffer | None = None  # FULL: compute dtype, all shards, ours

    def release(self, *, after_forward: bool) -> None:
        """As of `Gatherer`; the bytes were given back, or kept for backward, when they came."""
        assert self._whole is not None
        if not after_forward:
            self.forget_kept()
        if not self._group.keeps_memory:
            self._whole.release()

    def _new_buffer(self) -> DBuffer:
        """Of bytes, each rank's chunk a shard."""
        group, wire = self._group, wire_of(self._group.layout, self._forms)
        buffer = DBuffer(
            wire.layout, group.mesh, sharded_placements(group.mesh), torch.uint8, group.device,
            full=True, strategy=group.comms, name=lambda: group.names,
        )  # fmt: skip
        self._sent = [_placed(buffer, piece, self._forms[piece.param]) for piece in wire.pieces]
        return buffer

    @torch.no_grad()
    def _fill(self, buffer: DBuffer) -> None:
        """Writes what this rank sends into its chunk."""
        shard = self._group.shard
        begin = shard.rank * shard.layout.shard_size
        for sent in self._sent:
            piece, content, tiles = sent.piece, sent.content, sent.form.tiles
            if piece.rank != shard.rank:
                continue
            own = shard.local[piece.begin - begin :][: piece.numel]
            if isinstance(content, torch.Tensor):
                content.copy_(own, non_blocking=True)
                continue
            assert tiles is not None
            found = quantize(own.view(content.codes.shape), tiles)
            if own.device.type == "cpu" and found.scales.isnan().any():  # elsewhere it would wait
                warnings.warn(_not_finite(self._group.params[piece.param].name), stacklevel=1)
            content.codes.copy_(found.codes, non_blocking=True)
            content.scales.copy_(found.scales, non_blocking=True)

    @torch.no_grad()
    def _arrived(self, buffer: DBuffer) -> DBuffer:
        """The unsharded parameters, made of what all ranks have sent."""
        if self._whole is None:
            self._whole = self._group.new_buffer(self._group.compute_dtype)
        elif not self._whole.allocated:
            self._whole.acquire()
        whole = self._whole
        whole.set_placements([Replicate()] * whole.mesh.ndim)
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for sent in self._sent:
            piece, content, tiles = sent.piece, sent.content, sent.form.tiles
            # not the parameter itself, which autograd may have saved: see `DBuffer.view`
            target = whole.local[piece.begin : piece.begin + piece.numel]
            if isinstance(content, torch.Tensor):
                plain.append((target, content))
            else:
                assert tiles is not None
                dequantize_into(target.view(content.codes.shape), content, tiles)
        if plain:
            torch._foreach_copy_([target for target, _ in plain], [own for _, own in plain])
        if self._keeper is not None:
            self._keeper.release(keep=self._group.backward_mesh is not None)
        else:
            buffer.release()
        return whole


def _placed(buffer: DBuffer, piece: Piece, form: Form) -> _Sent:
    """A piece in the buffer's memory, which it has in every state."""
    values = buffer.view(piece.values)
    if form.tiles is None or piece.scales is None:
        return _Sent(piece, form, values.view(form.dtype))
    shape = form.tiles.matrices(piece.numel, form.shape)
    scales = buffer.view(piece.scales).view(torch.float32).view(form.tiles.grid(shape))
    return _Sent(piece, form, Quantized(values.view(form.tiles.dtype).view(shape), scales))


def _not_finite(name: str) -> str:
    return (
        f"fsdp: parameter {name!r} has elements that are not finite on this rank: whole tiles of "
        f"it are NaN on all ranks"
    )
