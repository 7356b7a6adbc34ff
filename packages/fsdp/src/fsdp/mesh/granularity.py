"""Granularities: the runs of a parameter's elements that sharding keeps together on one rank."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor import Shard

from ragged_shard.planner import Layout, balance
from ragged_shard.planner.balance import work_of_shards

__all__ = ["Balance", "Block", "Granularity", "Rows", "Whole", "block_size"]


@dataclass(frozen=True)
class Rows:
    """Whole rows of ``view(-1, last_dim)``, `n` at a time: 32 of them for 8-bit Adam's blocks.

    Attributes:
        n: rows; more than there are mean the whole tensor.
    """

    n: int = 1

    def __post_init__(self) -> None:
        """Makes the number a plain int."""
        object.__setattr__(self, "n", operator.index(self.n))


@dataclass(frozen=True)
class Block:
    """`n` elements of the flattened tensor at a time; one is the default of `fully_shard`.

    Attributes:
        n: elements; more than there are mean the whole tensor.
    """

    n: int = 1

    def __post_init__(self) -> None:
        """Makes the number a plain int."""
        object.__setattr__(self, "n", operator.index(self.n))


class Balance:
    """The optimizer work of each rank with the `Whole()` parameters of a model, over all groups.

    Use one for each model: two models that are sharded in the same way then get the same owners.
    """

    def __init__(self) -> None:
        self._busy: dict[Hashable, tuple[int, ...]] = {}

    def busy(self, ranks: Hashable) -> tuple[int, ...]:
        """Returns the work of each rank so far; () before the first group."""
        return self._busy.get(ranks, ())

    def place(self, layout: Layout, work: Sequence[int], ranks: Hashable) -> Layout:
        """Returns a group's layout with the largest shards at the ranks with the least work.

        The work is added to that of the ranks.

        Args:
            layout: of the group.
            work: of each parameter.
            ranks: those over which it is sharded: a mesh, whose last axis counts, or another key.
        """
        busy = self.busy(ranks) or (0,) * layout.world_size
        layout = balance(layout, work, busy)
        more = work_of_shards(layout, work)
        self._busy[ranks] = tuple(before + its for before, its in zip(busy, more, strict=True))
        return layout


@dataclass(frozen=True)
class Whole:
    """The whole tensor on one rank, as Muon and Shampoo need it.

    Attributes:
        work: of its rank with it in a step of the optimizer, in any unit.
        balance: of the model: gives the ranks equal work over all groups; None chooses owners by
            bytes alone. `fsdp.optim.WholeMatrices` sets both.
    """

    work: int = 0
    balance: Balance | None = None


Granularity: TypeAlias = Rows | Block | Whole


def block_size(granularity: object, shape: Sequence[int], name: str) -> int:
    """Returns the elements of a block that is not split: at least one, at most the tensor's.

    Args:
        granularity: what a ``shard_placement_fn`` returned. None is ``Block(1)``; torch's
            ``Shard(0)`` keeps slices of the first dim whole, as FSDP2 does by default.
        shape: of the tensor.
        name: of the parameter, for errors.

    Raises:
        ValueError: it is none of these, is below 1, or shards another dim than the first: a flat
            buffer has no columns.
    """
    numel = math.prod(shape)
    if granularity is None:
        size = 1
    elif isinstance(granularity, Rows | Block):
        if granularity.n < 1:
            raise ValueError(
                f"fully_shard: shard_placement_fn: expected n >= 1 for parameter {name!r}, got "
                f"{granularity}"
            )
        row = shape[-1] if isinstance(granularity, Rows) and shape else 1
        size = granularity.n * row
    elif isinstance(granularity, Whole):
        size = numel
    elif isinstance(granularity, Shard):
        if not -len(shape) <= granularity.dim < len(shape):
            raise ValueError(
                f"fully_shard: shard_placement_fn gave {granularity} for {name!r}, whose shape "
                f"{tuple(shape)} has no such dim; return a dim that exists, or Block(n)"
            )
        if granularity.dim not in (0, -len(shape)):
            raise ValueError(
                f"fully_shard: shard_placement_fn: expected Shard(0), got "
                f"Shard({granularity.dim}) for parameter {name!r} of shape {tuple(shape)}; "
                f"return Shard(0), Rows(n), Block(n) or Whole(), or use torch's fully_shard for it"
            )
        size = math.prod(shape[1:])
    else:
        raise ValueError(
            f"fully_shard: Invalid shard_placement_fn result: expected None, torch's Shard, or one "
            f"of Rows(n), Block(n), Whole() for parameter {name!r}, got {granularity!r}"
        )
    return max(1, min(size, numel))
