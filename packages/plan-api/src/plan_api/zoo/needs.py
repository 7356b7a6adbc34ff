"""What plans of several models ask for: axes, and the placement of fused projections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.axes import axis_names
from plan_api.context.attend import Method
from plan_api.context.order import OrderName
from plan_api.plan import Plan

__all__ = ["Sequences", "check_options", "cut_batch", "cut_classes", "cut_sequence", "fused"]


@dataclass(frozen=True)
class Sequences:
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
    def of(cls, axis: str | None, method: Method, order: OrderName | None) -> Sequences | None:
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
    dp: str | None = None,
    ep: str | None = None,
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
    if ep is not None and ep == dp:
        raise ValueError(
            f"zoo.{name}: ep={ep!r} is the axis that cuts the batch, and tokens are not sent to "
            f"the experts' ranks yet; divide experts along tp, or along an axis of their own"
        )

    if cp is not None and cp in (tp, dp, ep):
        other = "tp" if cp == tp else "dp" if cp == dp else "ep"
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


def cut_batch(plan: Plan, dp: str | None, inputs: Iterable[str], *random: str) -> None:
    """What a model of transformers is given is cut along the batch, and what comes of it is said.

    Args:
        plan: is added to.
        dp: the axis of data parallelism; None: every rank has the whole batch.
        inputs: of the model.
        random: operators that draw random numbers, per element of the batch.
    """
    for name in inputs:
        plan.shard(f"<in:{name}>", *([Shard(0)], dp) if dp else ([Replicate()] * len(plan.axes),))
    if dp is None:
        return
    plan.annotate(r".*\.grad", Partial(), dp)
    for operator in ("<op:cross_entropy>", *random):
        plan.annotate(operator, Shard(0), dp)
    plan.redistribute("<out:loss>", Partial(), Replicate(), dp)
    plan.annotate("<out:logits>", Shard(0), dp)


def cut_classes(plan: Plan, tp: str) -> None:
    """What a model of transformers does with logits whose vocabulary is cut.

    Args:
        plan: is added to.
        tp: the axis that cuts it.
    """
    plan.annotate("<op:view>", Shard(1), tp)
    plan.annotate("<op:cross_entropy>", Shard(1), tp)
    plan.annotate("<out:logits>", Shard(2), tp)


def cut_sequence(
    plan: Plan, sequences: Sequences, dp: str | None, positions: str, attention: str
) -> None:
    """What a language model of transformers is given is cut along the sequence.

    Args:
        plan: is added to.
        sequences: how.
        dp: the axis of data parallelism; None: every rank of another axis has the whole batch.
        positions: the argument that takes the numbers of tokens.
        attention: modules that call scaled_dot_product_attention.
    """
    cp, order = sequences.axis, sequences.order
    if dp is not None:
        cut_batch(plan, dp, ("input_ids", "labels", "shift_labels"))
    plan.sequence("<in:input_ids>", cp, order=order)
    plan.sequence("<in:labels>", cp, order=order, shift="shift_labels")
    plan.sequence(positions, cp, order=order)
    heads = "config.num_key_value_heads"
    plan.context(attention, cp, method=sequences.method, order=order, heads=heads)
    plan.redistribute("<out:loss>", Partial(), Replicate(), cp)
