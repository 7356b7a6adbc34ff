"""Activation checkpointing: recomputes the activations of layers in backward.

The modes are torchtitan's (torchtitan/distributed/activation_checkpoint.py), implemented by torch
(torch/utils/checkpoint.py). Only `forward` of the layers is replaced, so that `fully_shard`, plans
and `parallelize_module` find the same modules and names.
"""

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from integration.systems.base import Recompute

_aten = torch.ops.aten
# Operators with the most FLOPs per byte of output: matrix products and attention.
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
    """Makes layers recompute activations in backward; call it before parallelizing them.

    Args:
        layers: layers of a model, in order; their `forward` is replaced.
        mode: ``full`` recomputes each layer; ``selective-op`` recomputes all operators but matrix
            products and attention; ``selective-layer`` recomputes one of ``every`` layers.
        every: see ``selective-layer``.
    """
    if mode == "none":
        return
    # Under torch.compile, passing no context differs from passing torch's empty one.
    options = {"context_fn": _selective_contexts} if mode == "selective-op" else {}
    for layer in layers[:: every if mode == "selective-layer" else 1]:
        forward = _recomputed(type(layer).forward, options)
        # Bound as a method, so that a copy of the layer does not call the original.
        layer.forward = MethodType(forward, layer)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # plans look up the names of arguments
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
