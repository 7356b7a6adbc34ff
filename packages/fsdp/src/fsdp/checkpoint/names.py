"""The tensors of a model, their names in files, and the boxes of them that this rank has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp._compat import canonical_names
from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.geometry.stored_boxes import StoredBox, rank_stored_boxes, replicates

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A tensor in a file that is a box of a model's tensor, as of an expert of several in one.

    Attributes:
        name: in the file.
        shape: in the file: `sizes`, or `sizes` without leading ones.
        offsets: of the box in the model's tensor.
        sizes: of the box.
    """

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape

    @property
    def box(self) -> TensorBox:
        """The box of the model's tensor."""
        return TensorBox(self.offsets, self.sizes)


Rename: TypeAlias = Callable[[str], str | Sequence[TensorPart] | None]


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A parameter or persistent buffer; tied parameters are one.

    Attributes:
        names: in the model, several for tied parameters.
        tensor: detached, in the memory of the parameter; a DTensor if it is sharded.
        files: what it is in files, for each name that files may have it under.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    files: tuple[tuple[TensorPart, ...], ...]

    @property
    def name(self) -> str:
        """The first of its names, for errors."""
        return self.names[0]


def model_tensors(model: nn.Module, rename: Rename | None) -> list[ModelTensor]:
    """Returns the tensors of a model in the order of its state dict, without those left out.

    Args:
        model: whose sharded parameters are registered afterwards.
        rename: of `fsdp.checkpoint.load_safetensors`.

    Raises:
        ValueError: a value of the state dict is no tensor; parts are not those of the tensor.
    """
    state = get_model_state_dict(model)
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        for key in canonical_names(model, name):
            tied.setdefault(first.setdefault(id(tensor), key), []).append(key)
    others = {key for keys in tied.values() for key in keys[1:]}
    found = []
    for key, value in state.items():
        if key in others:
            continue
        names = tuple(one for one in tied.get(key, [key]) if one in state)
        renamed = {one: one if rename is None else rename(one) for one in names}
        files = tuple(
            _parts(one, value, target) for one, target in renamed.items() if target is not None
        )
        if files:
            assert isinstance(value, torch.Tensor)  # which _parts has checked
            found.append(ModelTensor(names, value, files))
    return found


def _parts(name: str, value: object, target: str | Sequence[TensorPart]) -> tuple[TensorPart, ...]:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"fsdp.checkpoint: expected a state dict of tensors, got {type(value).__name__} for "
            f"{name!r}; leave it out by a rename= that returns None for it"
        )
    shape = tuple(value.shape)
    if isinstance(target, str):
        return (TensorPart(target, shape, (0,) * len(shape), shape),)
    parts = tuple(target)
    covered = sum(part.box.numel for part in parts)
    seen: set[Shape] = set()
    for part in parts:
        inside = len(part.offsets) == len(part.sizes) == len(shape) and all(
            offset >= 0 and offset + size <= length
            for offset, size, length in zip(part.offsets, part.sizes, shape, strict=True)
        )
        leading = len(part.sizes) - len(part.shape)
        same = leading >= 0 and part.sizes == (1,) * leading + part.shape
        repeated = part.offsets in seen
        seen.add(part.offsets)
        if not inside or not same or repeated or covered != math.prod(shape):
            raise ValueError(
                f"rename: expected parts that are the boxes of {name!r} of shape {shape}, got "
                f"{part}{' at the offsets of another' if repeated else ''} among {len(parts)} "
                f"parts of {covered} elements"
            )
    return parts


@dataclass(frozen=True, eq=False)
class LocalShard:
    """This rank's elements of a tensor.

    Attributes:
        local: the local tensor, of any strides.
        boxes: of the global tensor, with their windows of the contiguous local tensor.
    """

    local: torch.Tensor
    boxes: tuple[StoredBox, ...]


def local_shard(tensor: torch.Tensor, name: str) -> LocalShard:
    """Returns what a rank has of a plain tensor or a DTensor of any placements.

    Raises:
        ValueError: the tensor is not reduced yet (Partial).
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor, rank_stored_boxes(shape, (), (), ()))
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"fsdp.checkpoint: expected a reduced tensor for {name!r}, got placements "
            f"{placements}; redistribute it first"
        )
    local, coordinate = tensor._local_tensor, mesh.get_coordinate()
    if coordinate is None:
        return LocalShard(local, ())
    boxes = rank_stored_boxes(shape, tuple(mesh.shape), placements, tuple(coordinate))
    return LocalShard(local, boxes)


def is_in_replica_of(tensor: DTensor, rank: int) -> bool:
    """Returns whether this rank and another are of the shards of one replica of a DTensor.

    Those of a replica have each element once.

    Args:
        tensor: of this rank; the other may have it on another mesh, as along the axis of TP.
        rank: in the default group.
    """
    mesh = tensor.device_mesh
    own, others = mesh.get_coordinate(), (mesh.mesh == rank).nonzero().tolist()
    return own is not None and any(
        all(
            a == b
            for a, b, placement in zip(own, other, tensor.placements, strict=True)
            if replicates(placement)
        )
        for other in others
    )


def pieces(box: TensorBox, elements: int) -> Iterator[TensorBox]:
    """Divides a box into boxes of at most so many elements, in row-major order."""
    if box.numel <= max(elements, 1):
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    step = max(elements * box.sizes[dim] // box.numel, 1)
    for start in range(0, box.sizes[dim], step):
        size = min(step, box.sizes[dim] - start)
        yield from pieces(
            TensorBox(
                _with(box.offsets, dim, box.offsets[dim] + start), _with(box.sizes, dim, size)
            ),
            elements,
        )


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
