"""All-to-all over heads: attention itself is one device's (DeepSpeed-Ulysses, arXiv 2309.14509).

Queries, keys and values go from a part of the sequence and all heads to all of the sequence and a
part of the heads, and the output comes back: four all-to-alls forward and four back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from plan_api.context_parallel.setting import Setting
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.runtime.local_redistribute import LocalRedistribution, local_redistribution

__all__ = ["check_heads", "ulysses_attention"]

_HEADS, _SEQUENCE = 1, 2


def ulysses_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, setting: Setting
) -> torch.Tensor:
    """Attention over all ranks' keys.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its heads divide the queries'.
        value: this rank's, of the shape of the keys.
        setting: of the call; in contiguous order.

    Raises:
        ValueError: heads that the axis does not divide; nothing has been sent.
    """
    for what, heads in (("heads", query.shape[_HEADS]), ("key-value heads", key.shape[_HEADS])):
        check_heads(what, heads, setting)
    mesh, axis, where, at = setting.mesh, setting.axis, setting.where, setting.in_backward
    to_heads = local_redistribution(Shard(_SEQUENCE), Shard(_HEADS), mesh, axis, where)
    to_sequence = local_redistribution(Shard(_HEADS), Shard(_SEQUENCE), mesh, axis, where)
    query, key, value = (_moved(one, to_heads, to_sequence, at) for one in (query, key, value))
    out = torch._C._nn.scaled_dot_product_attention(
        query, key, value, is_causal=setting.causal, scale=setting.scale,
        enable_gqa=key.shape[_HEADS] != query.shape[_HEADS],
    )  # fmt: skip
    return _moved(out, to_sequence, to_heads, at)


def check_heads(what: str, heads: int, setting: Setting) -> None:
    """Refuses heads that cannot be divided among the ranks."""
    if heads % setting.order.ranks:
        axis = (setting.mesh.mesh_dim_names or range(setting.mesh.ndim))[setting.axis]
        raise ValueError(
            f"{setting.where} has {heads} {what} on this rank, and axis {axis!r} of size "
            f"{setting.order.ranks} does not divide {heads}: method='ulysses' divides heads; use "
            f"method='ring' or 'all-gather'"
        )


def _moved(
    tensor: torch.Tensor,
    there: LocalRedistribution,
    back: LocalRedistribution,
    at: StepContext | None,
) -> torch.Tensor:
    result: torch.Tensor = _Moved.apply(tensor, there, back, at)  # type: ignore[no-untyped-call]
    return result


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        there: LocalRedistribution,
        back: LocalRedistribution,
        at: StepContext | None,
    ) -> torch.Tensor:
        ctx.back, ctx.at = back, at
        return there(tensor)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.back(grads[0]), None, None, None
