"""Granularities: the runs of a parameter that sharding never cuts."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor import Shard

from fsdp.balance import Balance

__all__ = ["Block", "Granularity", "Rows", "Whole", "block_size"]


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


@dataclass(frozen=True)
class Whole:
    """The whole tensor on one rank, as Muon and Shampoo would like it.

    Attributes:
        work: that its rank has with it in a step of the optimizer, in any unit.
        balance: of the model, which gives its groups' owners equal work; None leaves owners to
            bytes alone. `fsdp.optim.WholeMatrices` sets both.
    """

    work: int = 0
    balance: Balance | None = None


Granularity: TypeAlias = Rows | Block | Whole


def block_size(granularity: object, shape: Sequence[int], name: str) -> int:
    """Elements of a block that is never cut, at most those of the tensor and at least one.

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
        wanted = 1
    elif isinstance(granularity, Rows | Block):
        if granularity.n < 1:
            raise ValueError(
                f"fully_shard: shard_placement_fn gave {granularity} for {name!r}; wants n >= 1"
            )
        row = shape[-1] if isinstance(granularity, Rows) and shape else 1
        wanted = granularity.n * row
    elif isinstance(granularity, Whole):
        wanted = numel
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
        wanted = math.prod(shape[1:])
    else:
        raise ValueError(
            f"fully_shard: shard_placement_fn gave {granularity!r} for {name!r}; wants None, "
            f"torch's Shard, or one of Rows(n), Block(n), Whole()"
        )
    return max(1, min(wanted, numel))
