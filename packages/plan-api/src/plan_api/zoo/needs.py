"""What plans of several models ask for: axes, and the placement of fused projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.context_parallel.attend import Method
from plan_api.context_parallel.order import OrderName
from plan_api.spec.axes import axis_names
from plan_api.spec.plan import Plan

__all__ = [
    "Axes", "Context", "ExpertAxes", "check_options", "cut_batch", "cut_classes", "cut_sequence",
    "expert_axes", "fused", "names_of",
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


@dataclass(frozen=True)
class Context:
    """Context parallelism of a plan.

    Attributes:
        axis: along which sequences are cut.
        method: of attention over them.
        order: in which they are cut.
    """

    axis: str
    method: Method
    order: OrderName

    @classmethod
    def of(cls, axis: str | None, method: Method, order: OrderName | None) -> Context | None:
        """As plans are given it; None: none."""
        if axis is None:
            return None
        return cls(axis, method, order or ("contiguous" if method == "ulysses" else "zigzag"))


def check_options(
    name: str,
    tp: str | None,
    *,
    sp: bool = False,
    loss_parallel: bool = False,
    dp: Axes = None,
    ep: Axes = None,
    cp: str | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Refuses options that need an axis which is not there, or is taken.

    Args:
        name: of the plan, for messages.
        tp: the axis.
        sp: as the plans' option.
        loss_parallel: as the plans' option.
        dp: as the plans' option.
        ep: as the plans' option.
        cp: as the plans' option.
        mesh: of the plan, for the order of ``cp`` and ``tp``.

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
    if cp is not None and cp in (tp, *names_of(dp), *names_of(ep)):
        other = "tp" if cp == tp else "dp" if cp in names_of(dp) else "ep"
        raise ValueError(
            f"zoo.{name}: cp={cp!r} is {other} as well; sequences are cut along one of their own"
        )
    if cp is not None and sp and mesh is not None:
        axes = axis_names(mesh)
        if cp in axes and tp in axes and axes.index(cp) > axes.index(tp):
            raise ValueError(
                f"zoo.{name}: sp=True cuts along {tp!r} what {cp!r} has cut: the mesh has axes "
                f"{axes}; make it with {cp!r} before {tp!r}"
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


def cut_batch(
    plan: Plan, dp: Axes, inputs: Iterable[str], *random: str, cp: Context | None = None
) -> None:
    """What a model of transformers is given is cut along the batch, and what comes of it is said.

    But for gradients of experts, which may be divided along the same axes.

    Args:
        plan: is added to.
        dp: the axes of data parallelism; None: every rank has the whole batch.
        inputs: of the model.
        random: operators that draw random numbers, per element of the batch.
        cp: context parallelism, which places the inputs where ``dp`` does not.
    """
    cut, part = [Shard(0)] * len(along := names_of(dp)), [Partial()] * len(along)
    for name in inputs if along or cp is None else ():
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


def cut_sequence(plan: Plan, context: Context, dp: Axes, positions: str, attention: str) -> None:
    """What a language model of transformers is given is cut along the sequence.

    Args:
        plan: is added to.
        context: how.
        dp: the axes of data parallelism; None: every rank of another axis has the whole batch.
        positions: the argument that takes the numbers of tokens.
        attention: modules that call scaled_dot_product_attention.
    """
    cp, order = context.axis, context.order
    if dp is not None:
        plan.shard("<in:shift_labels>", [Shard(0)] * len(names_of(dp)), names_of(dp))
    plan.sequence("<in:input_ids>", cp, order=order)
    plan.sequence("<in:labels>", cp, order=order, shift="shift_labels")
    plan.sequence(positions, cp, order=order)
    heads = "config.num_key_value_heads"
    plan.context(attention, cp, method=context.method, order=order, heads=heads)
    plan.redistribute("<out:loss>", Partial(), Replicate(), cp)
