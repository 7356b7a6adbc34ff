"""Refuses the auxiliary loss of routers that transformers computes (`output_router_logits=True`).

The model's own code computes it as a product of means over its tokens, which on a part of the
tokens is another number, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import HookPoint, Lowered, Op, OpKind

__all__ = ["refuse_router_loss"]

_OPTION = "output_router_logits"


def refuse_router_loss(model: nn.Module, lowered: Lowered, mode: str) -> Iterator[RemovableHandle]:
    """Makes calls of a model that would compute a wrong router loss an error.

    In static mode it is correct if tokens are not sharded. Eager cannot compute it at all, because
    torch refuses to add a plain tensor of the model's own code to a DTensor.

    Args:
        model: any; only transformers' mixtures of experts are concerned.
        lowered: the plan, for this model.
        mode: as in `parallelize`.
    """
    if not hasattr(getattr(model, "config", None), _OPTION):
        return
    if mode == "eager" or any(map(_shards_tokens, lowered.ops)):
        yield model.register_forward_pre_hook(_refuse, prepend=True, with_kwargs=True)


def _shards_tokens(op: Op) -> bool:
    is_model_input = not op.path and op.hook_point is HookPoint.FORWARD_PRE
    return op.kind is OpKind.DISPATCH or (is_model_input and isinstance(op.dst, Shard))


def _refuse(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    requested, config = kwargs.get(_OPTION), getattr(model, "config", None)
    if requested if requested is not None else getattr(config, _OPTION, False):
        raise ValueError(
            f"{type(model).__name__}: expected {_OPTION}=False, got True, with which it computes a "
            f"loss of the tokens of one rank: set config.{_OPTION} = False, and compute a loss of "
            f"the routers in the script, from their outputs (register_forward_hook on "
            f"...mlp.gate) summed over the ranks"
        )
