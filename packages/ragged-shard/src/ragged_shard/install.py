"""Puts the package into stock torch, once, when a placement is first imported.

About twelve seams, each a function or method of torch's that asks "is there a placement of ours?"
and goes its own way if so; what holds none of ours runs torch's code unchanged. tests/test_seams.py
has a canary for every one: what stock torch does, silently, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.tensor._api as api
import torch.distributed.tensor._redistribute as redistribution
import torch.distributed.tensor._utils as utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import LocalLRUCache, ShardingPropagator
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import _compat, checkpoint, gathered_handlers, placing, propagation, redistribute
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.seams import replace_function, replace_method
from ragged_shard.spec import any_ours
from ragged_shard.strided import StridedRaggedShard


def install() -> None:
    """Installs every seam; a second call does nothing."""
    torch.serialization.add_safe_globals([RaggedShard, StridedRaggedShard, InterleavedShard])
    replace_function(api.distribute_tensor, placing.distribute_tensor)
    replace_function(
        redistribution.redistribute_local_tensor, redistribute.redistribute_local_tensor
    )
    replace_function(utils._compute_local_shape_and_global_offset, _refuse_to_lie)
    replace_function(state_dict_utils._distribute_tensors, checkpoint.distribute_tensors)
    replace_method(api._FromTorchTensor, "forward", placing.from_torch_tensor)
    replace_method(api._ToTorchTensor, "backward", placing.to_local_backward)
    replace_method(redistribution.Redistribute, "backward", redistribute.redistribute_backward)
    replace_method(DTensor, "__create_write_items__", checkpoint.create_write_items)
    replace_method(DTensor, "__create_chunk_list__", checkpoint.create_chunk_list)
    replace_method(DTensor, "__get_tensor_shard__", checkpoint.get_tensor_shard)
    if hasattr(DTensor, "_stable_hash_for_caching"):  # 2.12 and later
        replace_method(DTensor, "_stable_hash_for_caching", _compat.stable_hash)
    replace_method(
        ShardingPropagator, "propagate_op_sharding_non_cached", propagation.propagate_op_sharding
    )
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    gathered_handlers.install(handlers)


def _refuse_to_lie(
    stock: Callable[..., Any],
    global_shape: Sequence[int],
    mesh_shape: Any,
    coordinate: Any,
    placements: Sequence[Placement],
    *args: object,
    **kwargs: object,
) -> Any:
    """`_compute_local_shape_and_global_offset`: one box cannot say what a shard of ours holds.

    Raises:
        ValueError: for placements of ours, of which torch would otherwise return the whole tensor.
    """
    if any_ours(placements):
        raise ValueError(
            f"compute_local_shape_and_global_offset: {tuple(placements)} is no single box of the "
            f"tensor; use DTensor.__create_chunk_list__() for its boxes, or "
            f"ragged_shard.local_shape(shape, mesh, placements) for the local shape"
        )
    return stock(global_shape, mesh_shape, coordinate, placements, *args, **kwargs)
