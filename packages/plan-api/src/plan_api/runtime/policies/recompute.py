"""Recomputes the activations of modules in backward, by torch.utils.checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plan_api.lowering.ir import ModulePolicy
from plan_api.runtime.policies.kept_exchanges import kept_exchange_contexts
from plan_api.runtime.policies.replaced_forward import ReplacedForward, forward_of

__all__ = ["install_recompute", "recomputed_forward"]

_aten = torch.ops.aten
# Operators with the most FLOPs per byte of output: matrix products and fused attention, as in
# torchtitan/distributed/activation_checkpoint.py.
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_mm.default,
    }
)
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def install_recompute(
    model: nn.Module, recomputed: Mapping[str, ModulePolicy]
) -> Iterator[ReplacedForward]:
    """Makes modules recompute activations in backward; hooks of these modules run once.

    Args:
        model: any.
        recomputed: policies, by module path.
    """
    replaced: dict[tuple[Callable[..., Any], str], Callable[..., Any]] = {}
    for path, policy in recomputed.items():
        module = model.get_submodule(path)
        key = forward_of(module), policy.value
        # One function for all modules of a class, so that torch.compile compiles it once.
        if key not in replaced:
            replaced[key] = recomputed_forward(*key)
        yield ReplacedForward(module, replaced[key])


def recomputed_forward(forward: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Returns a ``forward`` that recomputes the activations of another one in backward.

    Args:
        forward: takes the module first.
        policy: ``"full"``; ``"selective-op"``, which keeps the results of matrix products and
            fused attention; or ``"keep-dispatch"``, which keeps the rows that are dispatched.
    """
    # Under torch.compile, passing no context differs from passing torch's empty one.
    options: dict[str, Any] = {"context_fn": _CONTEXTS[policy]} if policy in _CONTEXTS else {}
    # torch 2.13 cannot recompute operators that may draw random numbers, as fused attention
    # does, in a graph that takes DTensors: it takes their mesh for a tensor to save.
    with_dtensors = options or {"context_fn": _attention_contexts}

    @functools.wraps(forward)  # plans look up the names of arguments
    def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        chosen = options
        if torch.compiler.is_compiling() and any(isinstance(one, DTensor) for one in args):
            chosen = with_dtensors
        return checkpoint(forward, module, *args, use_reentrant=False, **chosen, **kwargs)

    return recomputed


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _PRODUCTS | _ATTENTION))


_CONTEXTS = {"selective-op": _selective_contexts, "keep-dispatch": kept_exchange_contexts}


def _attention_contexts() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _ATTENTION))


def _policy(
    saved: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
