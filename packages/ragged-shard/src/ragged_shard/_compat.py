"""What differs between torch 2.11 and 2.15, and the private names this package stands on.

tests/test_compat.py holds a canary for each: it fails when the difference or the name is gone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import torch
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard

# 2.13 renamed these two, and warns about the old names.
_Collective = Callable[..., torch.Tensor]
all_gather: _Collective = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
broadcast: _Collective = funcol.broadcast
reduce_scatter: _Collective = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)

is_tracing: Callable[[], bool] = funcol._are_we_tracing

_FIELDS = {field.name for field in dataclasses.fields(DTensorSpec)}


def make_spec(
    like: DTensorSpec, placements: tuple[Placement, ...], tensor_meta: TensorMeta
) -> DTensorSpec:
    """A spec on the mesh of another, reading `_StridedShard` as the other does (2.12 and later)."""
    if "use_strided_shard_as_shard_order" in _FIELDS and any(
        isinstance(placement, _StridedShard) for placement in placements
    ):
        return DTensorSpec(
            like.mesh,
            placements,
            tensor_meta=tensor_meta,
            use_strided_shard_as_shard_order=like.use_strided_shard_as_shard_order,
        )
    return DTensorSpec(like.mesh, placements, tensor_meta=tensor_meta)


def stock_local_shape(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    """The local shape at a coordinate of a mesh under stock placements."""
    local, _ = _utils._compute_local_shape_and_global_offset(
        shape, mesh_shape, list(coordinate), placements, True
    )
    return tuple(local)


def stock_offsets(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    """The global offset of the shard at a coordinate of a mesh under stock placements."""
    _, offsets = _utils._compute_local_shape_and_global_offset(
        shape, mesh_shape, list(coordinate), placements
    )
    return tuple(offsets)


def clear_native_cache() -> None:
    """Clears this thread's cache of decisions in C++, which torch 2.11 to 2.15 have."""
    torch._C._clear_DTensor_sharding_propagator_cache()


def stable_hash(stock: Callable[[DTensor], str], tensor: DTensor) -> str:
    """`DTensor._stable_hash_for_caching` (2.12 and later), with the local shape and strides.

    torch.compile's cache takes two tensors with one hash for one: with ragged shards they may
    differ in what each rank holds, and a warm cache then fails on sizes. (Stock's uneven Shard has
    that bug too, and is left to torch.)
    """
    digest = stock(tensor)
    if not any(isinstance(p, RaggedShard | InterleavedShard) for p in tensor._spec.placements):
        return digest
    local = tensor._local_tensor
    text = f"{digest} {tuple(local.shape)} {local.stride()}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
