"""Activation checkpointing: what the backward of a layer needs is computed again, not kept.

The modes are torchtitan's (torchtitan/distributed/activation_checkpoint.py); the work is torch's
(torch/utils/checkpoint.py). Layers keep their modules and names, as only `forward` is replaced:
hooks of `fully_shard`, of a plan and of `parallelize_module` find what they look for.
"""

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Recompute = Literal["none", "full", "selective-op", "selective-layer"]

_aten = torch.ops.aten
# What costs most to compute for each byte that it leaves: matrix products and attention.
SAVED_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def recompute_activations(layers: Sequence[nn.Module], mode: Recompute, *, every: int) -> None:
    """Have layers keep less for their backward; to be called before they are parallelised.

    Args:
        layers: of a model, in order; their `forward` is replaced.
        mode: ``full``, all that is inside a layer is computed again; ``selective-op``, all but
            matrix products and attention; ``selective-layer``, all of every so-manieth layer.
        every: of how many layers one is computed again by ``selective-layer``.
    """
    if mode == "none":
        return
    # Under torch.compile no context at all is other than torch's own empty one.
    options = {"context_fn": _selective_contexts} if mode == "selective-op" else {}
    for layer in layers[:: every if mode == "selective-layer" else 1]:
        forward = _recomputed(type(layer).forward, options)
        # Bound as methods are, so that a copy of the layer runs its own.
        layer.forward = MethodType(forward, layer)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # plans look the names of arguments up
    def recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, layer, *args, use_reentrant=False, **options, **kwargs)

    return recomputed


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    if operator in SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
