"""The auxiliary loss of routers, as transformers computes it (`output_router_logits=True`).

It counts the tokens that it sees, in code of the model's own: a product of means over tokens, of
which a rank that has some of them would compute another number, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import Act, Moment, Op
from plan_api.lowering.lower import Lowered

__all__ = ["refuse_router_loss"]

_OPTION = "output_router_logits"


def refuse_router_loss(model: nn.Module, lowered: Lowered, mode: str) -> Iterator[RemovableHandle]:
    """Makes calls of a model that would compute it an error, where it would be wrong.

    In static mode it is right where no rank has tokens of its own. Eager cannot compute it at all,
    for torch refuses to add what the model makes itself to a DTensor.

    Args:
        model: any; of others than transformers' mixtures of experts nothing is asked.
        lowered: the plan, for this model.
        mode: as of `parallelize`.
    """
    if not hasattr(getattr(model, "config", None), _OPTION):
        return
    if mode == "eager" or any(map(_cuts_tokens, lowered.ops)):
        yield model.register_forward_pre_hook(_refuse, prepend=True, with_kwargs=True)


def _cuts_tokens(op: Op) -> bool:
    given = not op.path and op.moment is Moment.FORWARD_PRE
    return op.act is Act.DISPATCH or (given and isinstance(op.dst, Shard))


def _refuse(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    asked, config = kwargs.get(_OPTION), getattr(model, "config", None)
    if asked if asked is not None else getattr(config, _OPTION, False):
        raise ValueError(
            f"{type(model).__name__} is asked for {_OPTION}=True, and the loss that it computes of "
            f"them is of the tokens of one rank: set config.{_OPTION} = False, and add a loss of "
            f"the routers in the script, from their outputs (register_forward_hook on "
            f"...mlp.gate) summed over the ranks"
        )
