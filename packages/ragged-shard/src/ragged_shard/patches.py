"""Makes torch support the placements of this package, and restores it.

Each patch point is a function or method of torch. Its replacement runs this package's code if a
placement of this package is among the arguments, and torch's code unchanged otherwise.
tests/test_patch_points.py has a canary for each, which shows torch's silent error without it.
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
    """Patches torch for the placements of this package; a second call does nothing.

    The first construction of a placement calls it, also when a placement is unpickled or copied.
    Only `torch.load(weights_only=True)` of a file with placements needs an explicit call before it,
    as it refuses classes that are not registered.

    The following is replaced in torch for every caller, also for those that imported a function by
    name before. Calls without a placement of this package run torch's own code:

    - ``torch.distributed.tensor``: ``distribute_tensor``; ``DTensor.from_local`` and the backward
      of ``to_local`` (``_FromTorchTensor.forward``, ``_ToTorchTensor.backward``); ``redistribute``
      and its backward (``redistribute_local_tensor``, ``Redistribute.backward``);
      ``_utils._compute_local_shape_and_global_offset``;
      ``OffsetBasedRNGTracker._distribute_region`` and ``_compute_rng_offsets``.
    - Operators: ``ShardingPropagator.propagate_op_sharding_non_cached`` and the cache above it;
      ``OpDispatcher.unwrap_to_op_info``; torch's entries in the dispatcher's table of special
      handlers (argmax, convolution and so on).
    - Checkpoints: ``DTensor.__create_write_items__``, ``__create_chunk_list__`` and
      ``__get_tensor_shard__``; ``torch.distributed._state_dict_utils._distribute_tensors``.
    - torch.compile: ``DTensor._stable_hash_for_caching`` (torch 2.12 and later).
    - ``torch.serialization``: the three placements are safe globals.

    Raises:
        TypeError: the version of torch is not supported; nothing is replaced.
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
    """Restores everything that `install` has replaced; without an `install` it does nothing.

    Do not pass remaining placements to torch before `install` is called again (constructing a
    placement calls it): torch would silently treat them as Replicate.

    Raises:
        RuntimeError: DTensors with placements of this package still exist, or other code has
            patched one of the patch points since. Nothing is restored.
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
    patches.method(OffsetBasedRNGTracker, "_distribute_region", random_regions.draw_as_shards)
    if hasattr(OffsetBasedRNGTracker, "_compute_rng_offsets"):  # CUDA's operators call it
        patches.method(OffsetBasedRNGTracker, "_compute_rng_offsets", random_regions.draw_as_shards)
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
    patches.undo_with("torch's cache of sharding decisions", _compat.clear_native_cache)


def _refuse_tensors_in_use() -> None:
    tensors = _tensors_in_memory()
    if tensors:  # perhaps garbage; to collect takes longer than to look
        tensors.clear()
        gc.collect()
        tensors = _tensors_in_memory()
    if tensors:
        first = tensors[0]
        raise RuntimeError(
            f"ragged_shard.uninstall: expected no DTensor with a placement of this package, got "
            f"{len(tensors)}, the first of shape {tuple(first.shape)} with placements "
            f"{first.placements}; delete them, or redistribute them to torch's placements, first"
        )


def _tensors_in_memory() -> list[DTensor]:
    return [
        tensor
        for tensor in gc.get_objects()
        if issubclass(type(tensor), DTensor) and any_custom(tensor._spec.placements)
    ]
