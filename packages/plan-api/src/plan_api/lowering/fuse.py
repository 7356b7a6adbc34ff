"""Operations of one site put together: each tensor is looked at once, and moved at most once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import Act, Moment, Op
from plan_api.spec.entry import Entry

__all__ = ["Move", "Override", "Site", "Step", "fuse", "last_words"]


@dataclass(frozen=True)
class Override:
    """Two operations, or entries of fully_shard, that decide the same: the later one holds."""

    earlier: Op | Entry
    later: Op | Entry

    def __str__(self) -> str:
        return f"{self.earlier} is overridden by {self.later}"


@dataclass(frozen=True)
class Move:
    """Along one axis; see `Op`."""

    dst: Placement
    src: Placement | None = None
    grad_dst: Placement | None = None
    grad_src: Placement | None = None
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Step:
    """What is done with one tensor at a site, along all axes at once.

    Attributes:
        tensor: as in `Op`.
        index: as in `Op`.
        act: as in `Op`.
        moves: by axis.
        entries: of the plan, which it comes from.
        lines: where these were written.
    """

    tensor: str
    index: int | str
    act: Act
    moves: Mapping[str, Move]
    entries: tuple[int, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def said(self) -> str:
        """The entries of the plan in words, for reports."""
        numbers = " and ".join(map(str, self.entries))
        return f"entry {numbers} of the plan" + f" ({', '.join(self.lines)})" * bool(self.lines)


@dataclass(frozen=True)
class Site:
    """A module at a moment, and all that is done there: one hook."""

    path: str
    moment: Moment
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.path}.{self.moment.value}" if self.path else self.moment.value

    @property
    def moved(self) -> tuple[Step, ...]:
        """What its hook does; regions and factories are others' (`ops.local_region`)."""
        others = (Act.FACTORY, Act.INDEX, Act.DISPATCH, Act.LOCAL, Act.CONTEXT)
        return tuple(one for one in self.steps if one.act not in others)


def last_words(ops: Iterable[Op]) -> tuple[list[Op], list[Override]]:
    """Of operations that decide the same only the last, in the order of the first.

    Returns:
        them, and what was overridden; saying the same again is no override.
    """
    held: dict[object, Op] = {}
    overrides = []
    for op in ops:
        earlier = held.get(op.target)
        if earlier is not None and _move(earlier) != _move(op):
            overrides.append(Override(earlier, op))
        held[op.target] = op
    return list(held.values()), overrides


def fuse(ops: Iterable[Op]) -> list[Site]:
    """Puts operations on one tensor into one step, and steps at one site into one hook.

    Operations on different tensors may change places; those on one tensor are done in the order of
    `Act`, and along all axes together, which is what each alone would have led to.

    Args:
        ops: of which no two decide the same.
    """
    sites: dict[tuple[str, Moment], dict[tuple[str, int | str, Act], list[Op]]] = {}
    for op in ops:
        steps = sites.setdefault((op.path, op.moment), {})
        steps.setdefault((op.tensor, op.index, op.act), []).append(op)
    return [Site(path, moment, tuple(_steps(steps))) for (path, moment), steps in sites.items()]


def _steps(steps: Mapping[tuple[str, int | str, Act], list[Op]]) -> Iterable[Step]:
    order = list(Act)
    for tensor, index, act in sorted(
        steps, key=lambda key: (key[0], str(key[1]), order.index(key[2]))
    ):
        ops = steps[tensor, index, act]
        moves = MappingProxyType({op.axis: _move(op) for op in ops})
        yield Step(
            tensor, index, act, moves, tuple(dict.fromkeys(op.entry for op in ops)),
            tuple(dict.fromkeys(op.line for op in ops if op.line)),
        )  # fmt: skip


def _move(op: Op) -> Move:
    return Move(op.dst, op.src, op.grad_dst, op.grad_src, op.options)
