"""The options and entries that the plans of several models share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.plan import Plan
from plan_api.spec.axes import axis_names
from plan_api.spec.plan_entries import ContextMethod, SequenceOrder

__all__ = [
    "Axes",
    "ContextParallel",
    "ExpertAxes",
    "check_ep_chunks",
    "check_no_sp_beside_cp",
    "check_options",
    "expert_axes",
    "names_of",
    "shard_batch",
    "shard_classes",
    "shard_sequence",
]  # fmt: skip

Axes: TypeAlias = "str | Sequence[str] | None"


def names_of(axes: Axes) -> list[str]:
    """Returns the axes that an option names: none, one, or several."""
    return [] if axes is None else [axes] if isinstance(axes, str) else [*axes]


@dataclass(frozen=True)
class ExpertAxes:
    """The axes of a mixture of experts.

    Attributes:
        sharded: axes along which experts are sharded.
        dispatched: the same axes, if they shard tokens, which are dispatched then; or none.
        summed: axes along which each rank has a part of an expert's output for a token.
        tokens: axes of data and context parallelism, along which tokens are sharded.
        outputs: by axis, the placements of the outputs of experts that are not sharded.
        tp: the axis of tensor parallelism.
        context: how sequences are sharded; None: they are not.
    """

    sharded: Sequence[str]
    dispatched: Sequence[str]
    summed: Sequence[str]
    tokens: Sequence[str]
    outputs: Mapping[str, Placement]
    tp: str | None
    context: ContextParallel | None

    @property
    def replicated(self) -> list[str]:
        """Axes of ``tokens`` along which experts are replicated."""
        return [axis for axis in self.tokens if axis not in self.sharded]

    @property
    def mlp_grad(self) -> Placement | None:
        """The argument of `decoder`; along a dispatched ``tp`` routers have parts of the tokens."""
        return None if self.tp in self.dispatched else Replicate()


def expert_axes(
    name: str,
    tp: str | None,
    dp: Axes,
    sp: bool,
    ep: Axes,
    context: ContextParallel | None = None,
) -> ExpertAxes:
    """Derives the axes of a mixture of experts from the plans' options.

    Args:
        name: of the plan, for messages.
        tp: as in the plans' options.
        dp: as in the plans' options.
        sp: as in the plans' options.
        ep: as in the plans' options.
        context: how sequences are sharded; None: they are not.

    Raises:
        ValueError: tokens are sharded along some axes of ``ep`` and not along others.
    """
    cp = None if context is None else context.axis
    sharded, tokens = names_of(ep), [*names_of(dp), *names_of(cp)]
    dispatched = [axis for axis in sharded if axis in tokens or (sp and axis == tp)]
    if dispatched and dispatched != sharded:
        others = ", ".join(repr(axis) for axis in sharded if axis not in dispatched)
        raise ValueError(
            f"zoo.{name}: expected all axes of ep={sharded} to shard tokens, or none, got "
            f"{', '.join(map(repr, dispatched))} that do and {others} that do not; shard them "
            f"there too, by dp or cp, or by sp=True for tp, or shard experts along other axes"
        )
    summed = [
        axis
        for axis in dict.fromkeys((*sharded, tp))
        if axis is not None and axis not in dispatched
    ]
    outputs: dict[str, Placement] = dict.fromkeys(tokens, Shard(0))
    if summed:
        outputs = dict.fromkeys(summed, Partial())
    return ExpertAxes(sharded, dispatched, summed, tokens, outputs, tp, context)


def check_ep_chunks(axes: ExpertAxes, chunks: int) -> None:
    """Refuses to divide into chunks what is not dispatched.

    Args:
        axes: of a mixture of experts.
        chunks: parts in which tokens are dispatched.

    Raises:
        ValueError: there are several, and tokens are not dispatched.
    """
    if chunks != 1 and not axes.dispatched:
        raise ValueError(
            f"ep_chunks={chunks}: expected axes of ep that shard tokens, which are dispatched, got "
            f"ep={axes.sharded or None}; name one of dp or cp, or tp with sp=True, or leave "
            f"ep_chunks out"
        )


@dataclass(frozen=True)
class ContextParallel:
    """Context parallelism of a plan.

    Attributes:
        axis: along which sequences are sharded.
        method: of attention over them.
        order: in which they are sharded.
    """

    axis: str
    method: ContextMethod
    order: SequenceOrder

    @classmethod
    def of(
        cls, axis: str | None, method: ContextMethod, order: SequenceOrder | None
    ) -> ContextParallel | None:
        """Makes it from the plans' options; None without an axis."""
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
    cp: str | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Refuses options that need an axis that is None, or used by another option.

    Args:
        name: of the plan, for messages.
        tp: the axis.
        sp: as in the plans' options.
        loss_parallel: as in the plans' options.
        dp: as in the plans' options.
        cp: as in the plans' options.
        mesh: of the plan, for the order of ``cp`` and ``tp``.

    Raises:
        ValueError: names the option.
    """
    if sp and tp is None:
        raise ValueError(
            f"zoo.{name}: sp=True shards the sequence along tp, which is None; name an axis"
        )
    if loss_parallel and tp is None:
        raise ValueError(
            f"zoo.{name}: loss_parallel=True shards the vocabulary along tp, which is None; name "
            f"an axis"
        )
    if cp is not None and cp in (tp, *names_of(dp)):
        other = "tp" if cp == tp else "dp"
        raise ValueError(
            f"zoo.{name}: cp={cp!r} is {other} as well; sequences are sharded along an axis of "
            f"their own"
        )
    if cp is not None and sp and mesh is not None:
        axes = axis_names(mesh)
        if cp in axes and tp in axes and axes.index(cp) > axes.index(tp):
            raise ValueError(
                f"zoo.{name}: sp=True shards along {tp!r} what {cp!r} has sharded: the mesh has "
                f"axes {axes}; make it with {cp!r} before {tp!r}"
            )


def check_no_sp_beside_cp(name: str, cp: str | None, *, sp: bool) -> None:
    """Refuses both, for models whose last layer has sharded sequences.

    Args:
        name: of the plan, for messages.
        cp: as in the plans' options.
        sp: as in the plans' options.

    Raises:
        ValueError: both are given.
    """
    if cp is not None and sp:
        raise ValueError(
            f"zoo.{name}: expected cp={cp!r} without sp, got sp=True, under which DTensor does not "
            f"view the patches that both shard in the last layer; pass sp=False"
        )


def shard_batch(
    plan: Plan, dp: Axes, inputs: Iterable[str], *random: str, cp: ContextParallel | None = None
) -> None:
    """Shards the batch of a transformers model, and annotates what follows from it.

    Gradients of experts are left out, because experts may be sharded along the same axes.

    Args:
        plan: to which entries are added.
        dp: the axes of data parallelism; None: every rank has the whole batch.
        inputs: of the model.
        random: operators that draw random numbers, per element of the batch.
        cp: context parallelism, which places the inputs where ``dp`` does not.
    """
    rows, part = [Shard(0)] * len(along := names_of(dp)), [Partial()] * len(along)
    for name in inputs if along or cp is None else ():
        plan.shard(f"<in:{name}>", *((rows, along) if along else ([Replicate()] * len(plan.axes),)))
    if not along:
        return
    plan.annotate(r"(?!.*\.experts\.).*\.grad", part, along)
    for operator in ("<op:cross_entropy>", *random):
        plan.annotate(operator, rows, along)
    plan.redistribute("<out:loss>", part, [Replicate()] * len(along), along)
    plan.annotate("<out:logits>", rows, along)


def shard_classes(plan: Plan, tp: str) -> None:
    """Annotates what a transformers model does with logits whose vocabulary is sharded.

    Args:
        plan: to which entries are added.
        tp: the axis that shards it.
    """
    plan.annotate("<op:view>", Shard(1), tp)
    plan.annotate("<op:cross_entropy>", Shard(1), tp)
    plan.annotate("<out:logits>", Shard(2), tp)


def shard_sequence(
    plan: Plan, context: ContextParallel, dp: Axes, positions: str, attention: str
) -> None:
    """Shards the sequence of a transformers language model.

    Args:
        plan: to which entries are added.
        context: the axis, method and order.
        dp: the axes of data parallelism; None: every rank of another axis has the whole batch.
        positions: the argument that takes the positions of tokens.
        attention: modules that call scaled_dot_product_attention.
    """
    cp, order = context.axis, context.order
    if dp is not None:
        plan.shard("<in:shift_labels>", [Shard(0)] * len(names_of(dp)), names_of(dp))
    plan.sequence("<in:input_ids>", cp, order=order)
    plan.sequence("<in:labels>", cp, order=order, shift="shift_labels")
    plan.sequence(positions, cp, order=order, positions=True)
    # What follows for the loss and for gradients, which static mode cannot see.
    plan.annotate("<op:cross_entropy>", Shard(0), cp)
    plan.annotate("<out:logits>", Shard(1), cp)
    plan.annotate(r"(?!.*\.experts\.).*\.grad", Partial(), cp)
    heads = "config.num_key_value_heads"
    plan.context(attention, cp, method=context.method, order=order, heads=heads)
    plan.redistribute("<out:loss>", Partial(), Replicate(), cp)
