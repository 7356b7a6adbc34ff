"""Replaces what torch does with the placements of this package, and puts it back.

Each patch point is a function or method of torch's that asks "is there a placement of this
package?" and takes this package's way if so; what holds none runs torch's code unchanged.
tests/test_patch_points.py has a canary for each: what torch does, silently, without it.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.tensor._api as api
import torch.distributed.tensor._redistribute as redistribution
import torch.distributed.tensor._utils as utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._sharding_prop import LocalLRUCache, ShardingPropagator

from ragged_shard import _compat, patch_points, random_regions
from ragged_shard.dispatch import handlers, propagation
from ragged_shard.dtensor import checkpoint, construction, local_tensor
from ragged_shard.geometry.specs import any_custom
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.patch_points import Patches
from ragged_shard.ragged import RaggedShard
from ragged_shard.redistribution import redistribute
from ragged_shard.strided import StridedRaggedShard

_lock = threading.RLock()


def install() -> None:
    """Teaches torch the placements of this package; a second call does nothing.

    The first construction of a placement calls it, also where a placement is unpickled or copied.
    `torch.load(weights_only=True)` of a file with placements is the one thing that needs the call
    before: it refuses classes that are not registered.

    Replaced in torch, for every caller, also one that imported the function by name before; what
    holds no placement of this package runs torch's own code:

    - ``torch.distributed.tensor``: ``distribute_tensor``; ``DTensor.from_local`` and the backward
      of ``to_local`` (``_FromTorchTensor.forward``, ``_ToTorchTensor.backward``); ``redistribute``
      and its backward (``redistribute_local_tensor``, ``Redistribute.backward``);
      ``_utils._compute_local_shape_and_global_offset``;
      ``OffsetBasedRNGTracker._distribute_region``.
    - Operators: ``ShardingPropagator.propagate_op_sharding_non_cached`` and the cache above it;
      ``OpDispatcher.unwrap_to_op_info``; torch's entries in the dispatcher's table of special
      handlers (argmax, convolution and so on).
    - Checkpoints: ``DTensor.__create_write_items__``, ``__create_chunk_list__`` and
      ``__get_tensor_shard__``; ``torch.distributed._state_dict_utils._distribute_tensors``.
    - torch.compile: ``DTensor._stable_hash_for_caching`` (torch 2.12 and later).
    - ``torch.serialization``: the three placements are safe globals.

    Raises:
        TypeError: a version of torch that is not supported; nothing is replaced.
    """
    with _lock:
        if patch_points.installed is not None:
            return
        patches = Patches()
        try:
            _apply(patches)
        except BaseException:
            patches.restore()
            raise
        patch_points.installed = patches


def uninstall() -> None:
    """Puts back all that `install` has replaced; nothing happens where nothing is installed.

    A placement that is still there must not be given to torch until `install` is called again
    (constructing another one does): torch would take it for a replica, silently.

    Raises:
        RuntimeError: DTensors with placements of this package still exist, or others have patched
            the same place of torch's since. Nothing is put back.
    """
    with _lock:
        if patch_points.installed is None:
            return
        _refuse_tensors_in_use()
        patch_points.installed.restore()
        patch_points.installed = None


def is_installed() -> bool:
    """Returns whether `install` is in effect."""
    return patch_points.installed is not None


def _apply(patches: Patches) -> None:
    known = torch.serialization.get_safe_globals()
    kinds = [RaggedShard, StridedRaggedShard, InterleavedShard]
    safe = torch.serialization.safe_globals([kind for kind in kinds if kind not in known])
    safe.__enter__()
    patches.undo_with("the safe globals", lambda: safe.__exit__(None, None, None))
    patches.function(api.distribute_tensor, construction.distribute_tensor)
    patches.function(
        redistribution.redistribute_local_tensor, redistribute.redistribute_local_tensor
    )
    patches.function(
        utils._compute_local_shape_and_global_offset, local_tensor.local_shape_and_global_offset
    )
    patches.function(state_dict_utils._distribute_tensors, checkpoint.distribute_tensors)
    patches.method(api._FromTorchTensor, "forward", construction.from_torch_tensor)
    patches.method(api._ToTorchTensor, "backward", construction.to_local_backward)
    patches.method(redistribution.Redistribute, "backward", redistribute.redistribute_backward)
    patches.method(OffsetBasedRNGTracker, "_distribute_region", random_regions.distribute_region)
    patches.method(DTensor, "__create_write_items__", checkpoint.create_write_items)
    patches.method(DTensor, "__create_chunk_list__", checkpoint.create_chunk_list)
    patches.method(DTensor, "__get_tensor_shard__", checkpoint.get_tensor_shard)
    if hasattr(DTensor, "_stable_hash_for_caching"):  # 2.12 and later
        patches.method(DTensor, "_stable_hash_for_caching", local_tensor.stable_hash)
    patches.method(
        ShardingPropagator, "propagate_op_sharding_non_cached", propagation.propagate_op_sharding
    )
    dispatcher = DTensor._op_dispatcher
    patches.method(type(dispatcher), "unwrap_to_op_info", propagation.unwrap_to_op_info)
    propagator: Any = dispatcher.sharding_propagator
    cache = LocalLRUCache(propagator.propagate_op_sharding_non_cached)
    patches.attribute(propagator, "propagate_op_sharding", cache)
    table: dict[Any, Any] = dispatcher._custom_op_handlers
    for op, guarded in handlers.guarded(table).items():
        patches.item(table, op, guarded)
    _compat.clear_native_cache()
    patches.undo_with("torch's cache of decisions", _compat.clear_native_cache)


def _refuse_tensors_in_use() -> None:
    gc.collect()
    tensors = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), DTensor) and any_custom(each._spec.placements)
    ]
    if tensors:
        first = tensors[0]
        raise RuntimeError(
            f"ragged_shard.uninstall: expected no DTensor with a placement of this package, got "
            f"{len(tensors)}, the first of shape {tuple(first.shape)} with placements "
            f"{first.placements}; delete them, or redistribute them to torch's placements, first"
        )
