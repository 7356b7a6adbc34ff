"""How the 8-bit state of a parameter is sharded, its creation, and its local tensors.

Note: blocks are counted from the first element of what a rank would have if the *block axis* were
replicated. The block axis is the mesh axis with a RaggedShard, or the only axis with a Shard(0).
Without tensor parallelism this is the whole parameter in the order of its storage, so blocks do not
depend on the number of ranks. With other sharded axes it is the local tensor of these axes, and
blocks depend on them. Where local tensors have different numbers of rows, blocks are those of the
largest: a smaller one has the first of them, and the last scales are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.adam8bit.quantization import CodeBook, block_count
from fsdp.optim.adam8bit.update import Moments
from fsdp.optim.tensors import local_of, placements_of
from ragged_shard import RaggedShard, StridedRaggedShard, even_shape, largest_shape, local_shape

__all__ = [
    "FP32_STATE", "QUANTIZED_STATE", "BlockLayout", "Placements", "block_layout", "local_moments",
    "new_state", "state_sharding",
]  # fmt: skip

Placements = tuple[Placement, ...]
#: The state of a parameter, besides "step", and its dtypes.
QUANTIZED_STATE = {
    "exp_avg": torch.uint8,
    "exp_avg_scale": torch.float32,
    "exp_avg_sq": torch.uint8,
    "exp_avg_sq_scale": torch.float32,
}
FP32_STATE = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@dataclass(frozen=True)
class BlockLayout:
    """How the state of a parameter is sharded, with every block on one rank.

    Attributes:
        mesh: the parameter's; None if it is not a DTensor.
        moments: placements of the codes; the parameter's unless `split_at` is set.
        scale_shape: (blocks,); with tensor parallelism (local tensors, blocks of each).
        scales: placements of the scales.
        split_at: an element inside a block at which the parameter's placements split the block;
            None if they split none.
    """

    mesh: DeviceMesh | None
    moments: Placements
    scale_shape: tuple[int, ...]
    scales: Placements
    split_at: int | None = None


def block_layout(param: torch.Tensor, block_size: int) -> BlockLayout:
    """Determines how the state of a parameter is sharded; every rank gets the same result.

    Args:
        param: has elements; a DTensor may have any placements but Partial.
        block_size: elements per block.
    """
    if not isinstance(param, DTensor):
        return BlockLayout(None, (), (block_count(param.numel(), block_size),), ())
    mesh, placements, shape = param.device_mesh, tuple(param.placements), tuple(param.shape)
    sharded = [axis for axis, p in enumerate(placements) if not isinstance(p, Replicate)]
    if not sharded:
        count = block_count(param.numel(), block_size)
        return BlockLayout(mesh, placements, (count,), placements)
    ragged = [axis for axis in sharded if isinstance(placements[axis], RaggedShard)]
    axis = (ragged or sharded)[0]
    others = (*placements[:axis], Replicate(), *placements[axis + 1 :])
    base_shape = even_shape(shape, mesh.shape, others)
    if base_shape is None and _has_units_of_largest(placements[axis]):
        base_shape = largest_shape(shape, mesh.shape, others)
    ends = None if base_shape is None else _rank_ends(placements[axis], base_shape, mesh.size(axis))
    if base_shape is None or ends is None or (len(sharded) > 1 and not ragged):
        return _gathered_layout(shape, mesh, max(sharded, key=mesh.size), block_size)
    last = math.prod(base_shape)
    split_at = next((end for end in ends if end % block_size and end != last), None)
    if split_at is None:
        return _aligned_layout(mesh, placements, axis, ends, block_size)
    return _resharded_layout(mesh, placements, axis, base_shape, block_size, split_at)


def new_state(param: torch.Tensor, layout: BlockLayout | None) -> dict[str, torch.Tensor]:
    """Creates the state of a parameter before its first step.

    Args:
        param: the parameter.
        layout: of its blocks; None if its moments are not quantized.
    """
    state = {"step": torch.tensor(0.0)}
    if layout is None:
        for key in FP32_STATE:
            state[key] = _full(param, tuple(param.shape), placements_of(param), 0, torch.float32)
        return state
    zeros = {"exp_avg": CodeBook.SIGNED.zero}
    for key, dtype in QUANTIZED_STATE.items():
        shape, placements = state_sharding(param, layout, key)
        state[key] = _full(param, shape, placements, zeros.get(key, 0), dtype)
    return state


def local_moments(state: dict[str, torch.Tensor], block_size: int) -> Moments:
    """Returns the local tensors of a state as flat views."""
    flat = {key: local_of(value).view(-1) for key, value in state.items() if key != "step"}
    count = block_count(flat["exp_avg"].numel(), block_size)
    flat |= {key: value[:count] for key, value in flat.items() if key.endswith("_scale")}
    return Moments(
        flat["exp_avg"], flat.get("exp_avg_scale"),
        flat["exp_avg_sq"], flat.get("exp_avg_sq_scale"), block_size,
    )  # fmt: skip


def state_sharding(
    param: torch.Tensor, layout: BlockLayout, key: str
) -> tuple[tuple[int, ...], Placements]:
    """Returns the global shape and the placements of a tensor of quantized state."""
    if key.endswith("_scale"):
        return layout.scale_shape, layout.scales
    return tuple(param.shape), layout.moments


def _has_units_of_largest(placement: Placement) -> bool:
    """Whether ranks have the same elements of the largest local tensor as of a smaller one."""
    return isinstance(placement, RaggedShard) and (placement.bases_differ or not placement.dims)


def _rank_ends(placement: Placement, base_shape: tuple[int, ...], ranks: int) -> list[int] | None:
    """Returns the element at which each rank's elements end; None if they are not contiguous."""
    if isinstance(placement, RaggedShard):
        return [placement.interval(base_shape, rank).stop for rank in range(ranks)]
    if type(placement) is not Shard or placement.dim != 0:
        return None
    rows = -(-base_shape[0] // ranks)  # as torch.chunk splits
    return [
        min(base_shape[0], rows * (rank + 1)) * math.prod(base_shape[1:]) for rank in range(ranks)
    ]


def _aligned_layout(
    mesh: DeviceMesh, placements: Placements, axis: int, ends: Sequence[int], block_size: int
) -> BlockLayout:
    """Every block is on one rank: the state has the placements of the parameter."""
    block_ends = [block_count(end, block_size) for end in ends]
    units = [end - start for start, end in zip([0, *block_ends], block_ends, strict=False)]
    scales: list[Placement] = [p if isinstance(p, Replicate) else Shard(0) for p in placements]
    other = [n for n, p in enumerate(scales) if n != axis and isinstance(p, Shard)]
    if not other:
        scales[axis] = RaggedShard((0,), units)
        return BlockLayout(mesh, placements, (block_ends[-1],), tuple(scales))
    # Local tensors of the other axes have scales of their own: a dim of its own keeps a checkpoint
    # at another tensor-parallel size from mixing them.
    local_tensors = math.prod(mesh.size(n) for n in other)
    split_factor = math.prod(mesh.size(n) for n in other if n > axis)
    strided = split_factor > 1
    scales[axis] = (
        StridedRaggedShard((0, 1), units, split_factor) if strided else RaggedShard((0, 1), units)
    )
    return BlockLayout(mesh, placements, (local_tensors, block_ends[-1]), tuple(scales))


def _resharded_layout(
    mesh: DeviceMesh,
    placements: Placements,
    axis: int,
    base_shape: tuple[int, ...],
    block_size: int,
    split_at: int,
) -> BlockLayout:
    """The parameter splits blocks: its state has placements of its own, with even block counts."""
    ends = _even_ends(math.prod(base_shape), mesh.size(axis), block_size)
    elements = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    original, dims = placements[axis], range(len(base_shape))
    aligned = RaggedShard(dims, elements)
    if isinstance(original, RaggedShard):
        aligned = original.with_units(dims, elements, 1 if original.bases_differ else None)
    resharded = (*placements[:axis], aligned, *placements[axis + 1 :])
    layout = _aligned_layout(mesh, resharded, axis, ends, block_size)
    return BlockLayout(mesh, resharded, layout.scale_shape, layout.scales, split_at)


def _gathered_layout(
    shape: tuple[int, ...], mesh: DeviceMesh, axis: int, block_size: int
) -> BlockLayout:
    """A rank's elements are not contiguous: the state is sharded over one axis, else replicated."""
    placements: Placements = (Replicate(),) * mesh.ndim
    return _resharded_layout(
        mesh, (*placements[:axis], Shard(0), *placements[axis + 1 :]), axis, shape, block_size, 0
    )  # fmt: skip


def _even_ends(numel: int, ranks: int, block_size: int) -> list[int]:
    count = block_count(numel, block_size)
    blocks = [count * (rank + 1) // ranks - count * rank // ranks for rank in range(ranks)]
    return [min(numel, end * block_size) for end in accumulate(blocks)]


def _full(
    param: torch.Tensor,
    shape: tuple[int, ...],
    placements: Placements,
    value: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    device = local_of(param).device
    if not isinstance(param, DTensor):
        return torch.full(shape, value, dtype=dtype, device=device)
    mesh = param.device_mesh
    local = torch.full(local_shape(shape, mesh, placements), value, dtype=dtype, device=device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
