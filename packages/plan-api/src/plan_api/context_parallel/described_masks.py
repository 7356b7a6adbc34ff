"""Makes models of transformers describe their masks to attention over a sharded sequence.

transformers makes a mask of queries and keys where attention has a sliding window, which no rank of
a sharded sequence has, and computes attention with sinks by operators. An attention that has no
function for masks gets none, but the window and the sinks of each layer, as flash attention does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plan_api.context_parallel.mask import AttentionMask
from plan_api.ops.function_calls import intercepted_calls

__all__ = ["describe_masks"]

_NAME = "plan_api"  # of the attention, as "sdpa" in transformers


def describe_masks(model: nn.Module) -> nn.Module:
    """Makes a model of transformers pass windows and sinks to `Plan.context`, and make no masks.

    Registers an attention in transformers, once, and sets it as the model's. Under a plan with
    `Plan.context` the model can be called then, and otherwise not. Dropout masks are those of eager
    attention.

    Args:
        model: of transformers, with attention that is causal or full, with or without sliding
            windows and sinks, and without caps of scores.

    Returns:
        the model.

    Raises:
        ValueError: it is not of transformers.
    """
    set_attention: Any = getattr(model, "set_attn_implementation", None)
    if set_attention is None:
        raise ValueError(
            f"describe_masks: expected a model of transformers, which has an attention "
            f"implementation, got a {type(model).__name__}; call scaled_dot_product_attention with "
            f"an AttentionMask as attn_mask"
        )
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    set_attention(_NAME)
    return model


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as transformers' implementations do.

    Args:
        module: its module.
        query: (batch, heads, sequence, features).
        key: as the queries; there may be fewer heads.
        value: as the keys.
        attention_mask: None, or the description of one.
        dropout: the probability of a weight to become zero.
        scaling: of products.
        is_causal: None: as the module is.
        sliding_window: the number of tokens, up to itself, that each attends to; None: all.
        s_aux: a score of each head for a key without a value; None: there is none.
        softcap: of scores; None, as others are not supported.

    Raises:
        ValueError: no plan replaces attention in the module, or an option is not supported.
    """
    path = type(module).__name__
    calls = intercepted_calls(nn.functional.scaled_dot_product_attention)
    if calls is None:
        raise ValueError(
            f"{path}: describe_masks() expects Plan.context for its module, as a plan of the zoo "
            f"with cp= has, got a call without; pass the model to parallelize() first"
        )
    if softcap is not None:
        raise ValueError(
            f"{path}: expected scores without a cap in attention over a sharded sequence, got "
            f"softcap={softcap}; shard no sequences of this model"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = AttentionMask(bool(causal), sliding_window)
    if attention_mask is not None:
        mask = attention_mask & mask
    out: torch.Tensor = calls(
        query, key, value, mask, dropout, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1], sinks=s_aux,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
