"""The all-gather of a group with quantized parameters: codes and scales, in one collective."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from dbuffer import BufferMemory, DBuffer
from fsdp.collectives.all_gather import PlannedAllGather, UpdateGather
from fsdp.collectives.comm import BufferSpec, CommStreams
from fsdp.param import FSDPParam
from fsdp.quantized.byte_layout import ParamFormat, SentPart, byte_layout_of
from fsdp.quantized.tiles import Quantized, dequantize_into, quantize

__all__ = ["QuantizedAllGather"]


@dataclass(frozen=True, eq=False)
class _PartView:
    """A part in the memory of the buffer of bytes.

    Attributes:
        part: what it is.
        form: of its parameter.
        content: (numel,) elements, or codes (m, R, C) and scales (m, strips, tiles of a strip).
    """

    part: SentPart
    form: ParamFormat
    content: torch.Tensor | Quantized


class QuantizedAllGather(PlannedAllGather):
    """Quantizes this rank's tiles, gathers the bytes, and dequantizes to unsharded parameters.

    No rank boundary splits a tile, so a scale depends on one rank only. Modules compute with what
    was dequantized; a kernel that multiplies by codes and scales would use the content of `_views`
    in place of `_copy_out`.

    Args:
        shard: as of `PlannedAllGather`.
        params: as of `PlannedAllGather`.
        buffers: as of `PlannedAllGather`.
        dtype: as of `PlannedAllGather`.
        streams: as of `PlannedAllGather`.
        post_forward_mesh: as of `PlannedAllGather`.
        updates: as of `PlannedAllGather`.
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
        super().__init__(shard, params, buffers, dtype, streams, post_forward_mesh, updates)
        shapes = [spec.shape or () for spec in buffers.layout.specs]
        self._formats = [
            ParamFormat(dtype, shape, param.tiles)
            for shape, param in zip(shapes, params, strict=True)
        ]
        self._views: list[_PartView] = []  # of all ranks' parts; made with the buffer of bytes
        self._unsharded: DBuffer | None = None  # FULL: compute dtype, memory for all shards

    @property
    def memory(self) -> BufferMemory | None:
        """Implements `GroupAllGather`."""
        return None if self._unsharded is None else self._unsharded.memory

    def free(self, *, after_forward: bool, keep_storage: bool) -> None:
        """Frees the unsharded parameters; `wait` has freed or resharded the bytes already."""
        assert self._unsharded is not None
        if not after_forward:
            self.free_post_forward_shard()
        self._unsharded.release(keep_storage=keep_storage)

    def _new_buffer(self) -> DBuffer:
        """Allocates the buffer of bytes, whose shards are the ranks' chunks."""
        bytes_ = byte_layout_of(self._buffers.layout, self._formats)
        buffer = self._buffers.full_buffer(torch.uint8, bytes_.layout)
        self._views = [_view(buffer, part, self._formats[part.param]) for part in bytes_.parts]
        return buffer

    @torch.no_grad()
    def _copy_in(self, buffer: DBuffer) -> None:
        """Writes what this rank sends into its chunk."""
        shard = self._shard
        begin = shard.rank * shard.layout.shard_size
        for view in self._views:
            part, content, tiles = view.part, view.content, view.form.tiles
            if part.rank != shard.rank:
                continue
            own = shard.local[part.begin - begin :][: part.numel]
            if isinstance(content, torch.Tensor):
                content.copy_(own, non_blocking=True)
                continue
            assert tiles is not None
            quantized = quantize(own.view(content.codes.shape), tiles)
            # not on other devices, where the host would wait for them
            if own.device.type == "cpu" and quantized.scales.isnan().any():
                warnings.warn(_not_finite(self._params[part.param].name), stacklevel=1)
            content.codes.copy_(quantized.codes, non_blocking=True)
            content.scales.copy_(quantized.scales, non_blocking=True)

    @torch.no_grad()
    def _copy_out(self, buffer: DBuffer) -> DBuffer:
        """Dequantizes what all ranks have sent, and frees or reshards the bytes."""
        if self._unsharded is None:
            self._unsharded = self._buffers.full_buffer(self._dtype)
        elif not self._unsharded.allocated:
            self._unsharded.acquire()
        unsharded = self._unsharded
        unsharded.set_placements([Replicate()] * unsharded.mesh.ndim)
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view in self._views:
            part, content, tiles = view.part, view.content, view.form.tiles
            # not the parameter itself, which autograd may have saved: see `DBuffer.view`
            target = unsharded.local[part.begin : part.begin + part.numel]
            if isinstance(content, torch.Tensor):
                plain.append((target, content))
            else:
                assert tiles is not None
                dequantize_into(target.view(content.codes.shape), content, tiles)
        if plain:
            torch._foreach_copy_([target for target, _ in plain], [own for _, own in plain])
        if self._post_forward is not None:
            self._post_forward.reshard(fill=self.post_forward_mesh is not None)
        else:
            buffer.release()
        return unsharded


def _view(buffer: DBuffer, part: SentPart, form: ParamFormat) -> _PartView:
    """Returns a part in the buffer's memory, which has the same address in every state."""
    values = buffer.view(part.values)
    if form.tiles is None or part.scales is None:
        return _PartView(part, form, values.view(form.dtype))
    shape = form.tiles.matrices(part.numel, form.shape)
    scales = buffer.view(part.scales).view(torch.float32).view(form.tiles.grid(shape))
    return _PartView(part, form, Quantized(values.view(form.tiles.dtype).view(shape), scales))


def _not_finite(name: str) -> str:
    return (
        f"fsdp: parameter {name!r} has elements that are not finite on this rank: whole tiles of "
        f"it are NaN on all ranks"
    )
