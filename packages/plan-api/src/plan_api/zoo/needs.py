"""What plans of several models ask for: axes, and the placement of fused projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.plan import Plan

__all__ = [
    "Axes", "ExpertAxes", "check_options", "cut_batch", "cut_classes", "expert_axes", "fused",
    "names_of",
]  # fmt: skip

Axes: TypeAlias = "str | Sequence[str] | None"


def names_of(axes: Axes) -> list[str]:
    """Axes that an option names: none, one, or several."""
    return [] if axes is None else [axes] if isinstance(axes, str) else [*axes]


@dataclass(frozen=True)
class ExpertAxes:
    """Of a mixture of experts.

    Attributes:
        along: axes along which experts are divided.
        sent: these, if they cut tokens, which are sent then; or none.
        summed: axes along which each rank has a part of what experts make of a token.
        left: those of data along which experts are the same on all ranks.
    """

    along: Sequence[str]
    sent: Sequence[str]
    summed: Sequence[str]
    left: Sequence[str]


def expert_axes(name: str, tp: str | None, dp: Axes, sp: bool, ep: Axes) -> ExpertAxes:
    """What becomes of experts along which axis.

    Args:
        name: of the plan, for messages.
        tp: as the plans' option.
        dp: as the plans' option.
        sp: as the plans' option.
        ep: as the plans' option.

    Raises:
        ValueError: tokens are cut along some axes of ``ep`` and not along others.
    """
    along, data = names_of(ep), names_of(dp)
    sent = [axis for axis in along if axis in data or (sp and axis == tp)]
    if sent and sent != along:
        others = ", ".join(repr(axis) for axis in along if axis not in sent)
        raise ValueError(
            f"zoo.{name}: of ep={along} {', '.join(map(repr, sent))} cut tokens and {others} do "
            f"not; cut them there too, by dp, or by sp=True for tp, or divide experts along others"
        )
    summed = [axis for axis in dict.fromkeys((*along, tp)) if axis is not None and axis not in sent]
    return ExpertAxes(along, sent, summed, [axis for axis in data if axis not in along])


def check_options(
    name: str,
    tp: str | None,
    *,
    sp: bool = False,
    loss_parallel: bool = False,
) -> None:
    """Refuses options that need an axis which is not there, or is taken.

    Args:
        name: of the plan, for messages.
        tp: the axis.
        sp: as the plans' option.
        loss_parallel: as the plans' option.

    Raises:
        ValueError: names the option.
    """
    if sp and tp is None:
        raise ValueError(
            f"zoo.{name}: sp=True cuts the sequence along tp, which is None; name an axis"
        )
    if loss_parallel and tp is None:
        raise ValueError(
            f"zoo.{name}: loss_parallel=True cuts the vocabulary along tp, which is None; name an "
            f"axis"
        )


def fused(dim: int, parts: int, name: str) -> Placement:
    """A Shard of each of the parts that a projection computes at once (ragged-shard's).

    Args:
        dim: of the parameter, which is made of so many parts.
        parts: 3 for queries, keys and values, 2 for a gate and what it gates.
        name: of the plan, for messages.

    Raises:
        ImportError: ragged-shard is not installed.
    """
    try:
        from ragged_shard import InterleavedShard
    except ImportError as error:
        raise ImportError(
            f"zoo.{name}: the model computes {parts} things by one matrix, and stock DTensor "
            f"cannot cut each of them; ragged-shard can: pip install plan-api[ragged]"
        ) from error
    return InterleavedShard(dim, parts)


def cut_batch(plan: Plan, dp: Axes, inputs: Iterable[str], *random: str) -> None:
    """What a model of transformers is given is cut along the batch, and what comes of it is said.

    But for gradients of experts, which may be divided along the same axes.

    Args:
        plan: is added to.
        dp: the axes of data parallelism; None: every rank has the whole batch.
        inputs: of the model.
        random: operators that draw random numbers, per element of the batch.
    """
    cut, part = [Shard(0)] * len(along := names_of(dp)), [Partial()] * len(along)
    for name in inputs:
        plan.shard(f"<in:{name}>", *((cut, along) if along else ([Replicate()] * len(plan.axes),)))
    if not along:
        return
    plan.annotate(r"(?!.*\.experts\.).*\.grad", part, along)
    for operator in ("<op:cross_entropy>", *random):
        plan.annotate(operator, cut, along)
    plan.redistribute("<out:loss>", part, [Replicate()] * len(along), along)
    plan.annotate("<out:logits>", cut, along)


def cut_classes(plan: Plan, tp: str) -> None:
    """What a model of transformers does with logits whose vocabulary is cut.

    Args:
        plan: is added to.
        tp: the axis that cuts it.
    """
    plan.annotate("<op:view>", Shard(1), tp)
    plan.annotate("<op:cross_entropy>", Shard(1), tp)
    plan.annotate("<out:logits>", Shard(2), tp)
