"""The all-gather of a group with quantized parameters: codes and scales, in one collective."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from dbuffer import BufferMemory, DBuffer, ResizableMemory
from fsdp.collectives.all_gather import PlannedAllGather, UpdateGather
from fsdp.collectives.comm import BufferSpec, CommStreams
from fsdp.mesh import ParamPlacement
from fsdp.param import FSDPParam
from fsdp.quantized.byte_layout import (
    ALIGNMENT,
    ParamFormat,
    SentPart,
    byte_layout_of,
    layout_of_some,
)
from fsdp.quantized.operands import Direction, OperandFormat
from fsdp.quantized.tiles import Quantized, dequantize_into, quantize
from ragged_shard import dim_of

__all__ = ["QuantizedAllGather"]


@dataclass(frozen=True, eq=False)
class _PartView:
    """A part in the memory of the buffer of bytes.

    Attributes:
        part: what it is.
        tensors: elements (numel,); or codes and scales of tiles, or what an operand has.
    """

    part: SentPart
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The ranks' chunks in a buffer of bytes, and the parts of all ranks in it."""

    buffer: DBuffer
    views: list[_PartView]


class _Operand:
    """A parameter that is gathered as the operand of products.

    Args:
        form: its format.
        dtype: of the unsharded parameter.
        shape: of this rank's part of the unsharded parameter.
        device: that computes.
        gather: as of `OperandFormat.unsharded`.
        groups: those of ranks that shard rows (-2) and columns (-1) of its matrices.
    """

    def __init__(
        self,
        form: OperandFormat,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        gather: Callable[[Direction], None],
        groups: Mapping[int, Sequence[dist.ProcessGroup]],
    ) -> None:
        self.form, self.shape, self._device, self._groups = form, shape, device, groups
        self.weight = form.unsharded(shape, dtype, device, gather)
        self.maxima: torch.Tensor | None = None  # of the sharing ranks, for the gather in flight
        self._memory: dict[Direction, ResizableMemory] = {}
        self._tensors: dict[Direction, list[torch.Tensor]] = {}

    def sharing(self, direction: Direction) -> list[dist.ProcessGroup]:
        """Returns the groups of ranks that share scales."""
        return [group for dim in self.form.shares(direction) for group in self._groups[dim]]

    def acquire(self, direction: Direction) -> list[torch.Tensor]:
        """Returns the tensors that all ranks' rows are copied into, allocated."""
        if direction not in self._memory:
            flat = math.prod(self.shape[:-1]), self.shape[-1]
            like = self.form.tensors(flat, direction)
            begins, end = [], 0
            for one in like:
                begins.append(end)
                end += -(-one.nbytes // ALIGNMENT) * ALIGNMENT
            memory = ResizableMemory(end, self._device)
            self._memory[direction] = memory
            self._tensors[direction] = [
                memory.bytes[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
                for begin, one in zip(begins, like, strict=True)
            ]
        elif not self._memory[direction].allocated:
            self._memory[direction].acquire()
        return self._tensors[direction]

    def release(self, *, keep_storage: bool) -> None:
        """Frees the operands of both directions."""
        self.form.clear(self.weight)
        for memory in self._memory.values():
            memory.release(keep_storage=keep_storage)


class QuantizedAllGather(PlannedAllGather):
    """Quantizes this rank's shards and gathers the bytes.

    No rank boundary splits a tile or a row of an operand. Tiles are dequantized to unsharded
    parameters; operands are copied out as they are, and modules multiply them (operands.py).

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
            ParamFormat(dtype, shape, param.tiles, param.operand)
            for shape, param in zip(shapes, params, strict=True)
        ]
        own = buffers.mesh.get_group(buffers.mesh.ndim - 1)
        self._operands = {
            i: _Operand(
                form.operand, dtype, form.shape, buffers.device, self.gather_missing,
                _sharding_groups(params[i].placement, len(form.shape), own),
            )
            for i, form in enumerate(self._formats)
            if form.operand is not None
        }  # fmt: skip
        self._two_sided = [i for i, one in self._operands.items() if one.form.differs_in_backward]
        self._others = [i for i in range(len(params)) if i not in self._operands]
        # What they are quantized from; under autocast, its dtype.
        self._source_dtype = dtype
        self._chunks: dict[tuple[Direction, bool], _Chunks] = {}
        self._in_use: _Chunks | None = None  # of the gather in flight
        self._direction: Direction = "forward"  # of the gather in flight
        self._complete: set[Direction] = set()  # the directions that modules can compute
        self._unsharded: DBuffer | None = None  # FULL: compute dtype, of what is no operand

    @property
    def memory(self) -> BufferMemory | None:
        """Implements `GroupAllGather`."""
        return None if self._unsharded is None else self._unsharded.memory

    def is_complete(self, *, for_backward: bool) -> bool:
        """Implements `GroupAllGather`."""
        return not self._two_sided or _direction(for_backward=for_backward) in self._complete

    def gather_missing(self, direction: Direction) -> None:
        """Gathers the operands of a direction that modules compute in unexpectedly.

        Backward computes in the direction of forward where it recomputes parts of a module.

        Raises:
            RuntimeError: the parameters are not unsharded.
        """
        if self._complete and self.in_flight:
            self.wait()
        if not self._complete:
            raise RuntimeError(
                f"fsdp: expected {self._buffers.names()} to be gathered where modules compute with "
                f"them, got sharded parameters; compute inside of the module that fully_shard "
                f"was called on, or call its unshard() before"
            )
        if direction not in self._complete:
            self.start(for_backward=direction == "backward")
            self.wait()

    def free(self, *, after_forward: bool, keep_storage: bool) -> None:
        """Frees the unsharded parameters; `wait` has freed or resharded the bytes already."""
        if not after_forward:
            self.free_post_forward_shard()
        for operand in self._operands.values():
            operand.release(keep_storage=keep_storage)
        self._complete.clear()
        if self._unsharded is not None:
            self._unsharded.release(keep_storage=keep_storage)

    def _acquire_buffer(self, *, for_backward: bool) -> DBuffer:
        """Returns the buffer of bytes for a direction, whose shards are the ranks' chunks."""
        device = self._buffers.device.type
        if not for_backward:
            is_autocast = torch.is_autocast_enabled(device)
            self._source_dtype = torch.get_autocast_dtype(device) if is_autocast else self._dtype
        self._direction = _direction(for_backward=for_backward) if self._two_sided else "forward"
        only_missing = bool(self._complete)
        key = self._direction, only_missing
        if key not in self._chunks:
            bytes_ = byte_layout_of(
                self._buffers.layout, self._formats, self._direction,
                self._two_sided if only_missing else None,
            )  # fmt: skip
            buffer = self._buffers.full_buffer(torch.uint8, bytes_.layout)
            self._chunks[key] = _Chunks(buffer, [_view(buffer, part) for part in bytes_.parts])
        self._in_use = self._chunks[key]
        self._in_use.buffer.acquire()
        return self._in_use.buffer

    @torch.no_grad()
    def _copy_in(self, buffer: DBuffer) -> None:
        """Writes what this rank sends into its chunk."""
        assert self._in_use is not None
        shard = self._shard
        self._reduce_maxima({view.part.param for view in self._in_use.views})
        for view in self._in_use.views:
            part, form = view.part, self._formats[view.part.param]
            if part.rank != shard.rank:
                continue
            own = self._own(part.param)
            if form.operand is not None:
                operand = self._operands[part.param]
                sent = form.operand.quantize(
                    self._rows(part.param), operand.maxima, self._direction,
                    begin=self._begin(part.param), shape=form.shape,
                )  # fmt: skip
            elif form.tiles is not None:
                quantized = quantize(own.view(view.tensors[0].shape), form.tiles)
                sent = quantized.codes, quantized.scales
                # not on other devices, where the host would wait for them
                if own.device.type == "cpu" and quantized.scales.isnan().any():
                    warnings.warn(_not_finite(self._params[part.param].name), stacklevel=1)
            else:
                sent = (own,)
            for target, tensor in zip(view.tensors, sent, strict=True):
                target.copy_(tensor, non_blocking=True)

    def _own(self, i: int) -> torch.Tensor:
        """Returns this rank's part of a parameter, flat; maybe without elements."""
        layout, shard = self._shard.layout, self._shard
        interval = layout.part(i, shard.rank)
        begin = layout.starts[i] + interval.start - shard.rank * layout.shard_size
        return shard.local[begin : begin + interval.size]

    def _rows(self, i: int) -> torch.Tensor:
        """Returns this rank's rows of an operand, of the dtype that is quantized."""
        rows = self._own(i).view(-1, self._formats[i].shape[-1])
        rows = rows.to(self._buffers.device, non_blocking=True)
        return rows.to(self._dtype).to(self._source_dtype)

    def _begin(self, i: int) -> int:
        """Returns the number of this rank's first row of an operand."""
        return self._shard.layout.part(i, self._shard.rank).start // self._formats[i].shape[-1]

    def _reduce_maxima(self, params: set[int]) -> None:
        """Reduces the largest magnitudes of blocks that ranks share, in a collective per group."""
        shared: dict[dist.ProcessGroup, list[_Operand]] = {}
        maxima: dict[_Operand, torch.Tensor] = {}
        for i in sorted(params & set(self._operands)):
            operand = self._operands[i]
            groups = operand.sharing(self._direction)
            for group in groups:
                shared.setdefault(group, []).append(operand)
            if groups:
                maxima[operand] = operand.form.maxima(
                    self._rows(i), self._direction, begin=self._begin(i), shape=operand.shape
                )
        for group, operands in shared.items():
            together = torch.cat([maxima[one] for one in operands])
            # Ranks of axes of other parallelism have the same rows, maybe none.
            if together.numel():
                dist.all_reduce(together, dist.ReduceOp.MAX, group)
            parts = together.split([maxima[one].numel() for one in operands])
            maxima.update(zip(operands, parts, strict=True))
        for operand in self._operands.values():
            operand.maxima = maxima.get(operand)

    @torch.no_grad()
    def _copy_out(self, buffer: DBuffer) -> None:
        """Copies operands, dequantizes tiles, and frees or reshards the bytes."""
        assert self._in_use is not None
        if self._others and not self._complete:
            self._acquire_others()
        targets: dict[int, list[torch.Tensor]] = {}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view in self._in_use.views:
            part, form = view.part, self._formats[view.part.param]
            if form.operand is not None:
                if part.param not in targets:
                    targets[part.param] = self._operands[part.param].acquire(self._direction)
                whole = math.prod(form.shape[:-1])
                row = part.begin // form.shape[-1]
                for target, tensor in zip(targets[part.param], view.tensors, strict=True):
                    rows_of_one = whole // target.shape[0]  # that have a row of scales
                    first = row // rows_of_one
                    pairs.append((target[first : first + len(tensor)], tensor))
                continue
            assert self._unsharded is not None
            # not the parameter itself, which autograd may have saved: see `DBuffer.view`
            begin = self._unsharded.layout.starts[self._others.index(part.param)] + part.begin
            target = self._unsharded.local[begin : begin + part.numel]
            if form.tiles is None:
                pairs.append((target, view.tensors[0]))
            else:
                codes = Quantized(*view.tensors)
                dequantize_into(target.view(codes.codes.shape), codes, form.tiles)
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [sent for _, sent in pairs])
        for i, gathered in targets.items():
            one = self._operands[i]
            one.form.fill(one.weight, gathered, one.maxima, self._direction)
        self._complete.add(self._direction)
        if self._post_forward is not None:
            self._post_forward.reshard(fill=self.post_forward_mesh is not None)
        else:
            buffer.release()

    def _unsharded_tensor(self, i: int) -> torch.Tensor:
        if i in self._operands:
            return self._operands[i].weight
        assert self._unsharded is not None
        return self._unsharded.view(self._others.index(i))

    def _acquire_others(self) -> None:
        """Allocates the memory of unsharded parameters that are no operands."""
        buffers = self._buffers
        if self._unsharded is None:
            layout = layout_of_some(buffers.layout, self._others) if self._operands else None
            self._unsharded = buffers.full_buffer(self._dtype, layout, params=self._others)
        elif not self._unsharded.allocated:
            self._unsharded.acquire()
        self._unsharded.set_placements([Replicate()] * self._unsharded.mesh.ndim)


def _sharding_groups(
    placement: ParamPlacement | None, dims: int, own: dist.ProcessGroup
) -> dict[int, list[dist.ProcessGroup]]:
    """Returns the groups of ranks that shard rows (-2) and columns (-1) of a weight's matrices.

    Args:
        placement: of the weight on axes of other parallelism.
        dims: of the weight.
        own: that of fully_shard, which shards rows.
    """
    groups: dict[int, list[dist.ProcessGroup]] = {-2: [own], -1: []}
    if placement is not None:
        mesh = placement.spec.mesh
        for axis, one in enumerate(placement.spec.placements):
            dim = dim_of(one)
            if dim is not None and dim - dims in groups and mesh.size(axis) > 1:
                groups[dim - dims].append(mesh.get_group(axis))
    return groups


def _direction(*, for_backward: bool) -> Direction:
    return "backward" if for_backward else "forward"


def _view(buffer: DBuffer, part: SentPart) -> _PartView:
    """Returns a part in the buffer's memory, which has the same address in every state."""
    tensors = tuple(
        buffer.view(one.number).view(one.form.dtype).view(one.form.shape) for one in part.tensors
    )
    return _PartView(part, tensors)


def _not_finite(name: str) -> str:
    return (
        f"fsdp: parameter {name!r} has elements that are not finite on this rank: whole tiles of "
        f"it are NaN on all ranks"
    )
