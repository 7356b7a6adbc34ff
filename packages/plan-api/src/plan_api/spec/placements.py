"""Placements as text, and the placement of fused projections."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "can_have_units", "format_placement", "interleaved_shard", "placement_code", "shard_of_units",
]  # fmt: skip


def format_placement(placement: Placement) -> str:
    """Formats a placement as ``R``, ``S(0)``, ``P`` or ``P(avg)``; others as `str` does."""
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if type(placement) is Partial:
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return str(placement)


def placement_code(placement: Placement) -> str:
    """Formats a placement as Python code: ``Replicate()``, ``Shard(0)``, ``Partial("avg")``."""
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    if type(placement) is Partial:
        return "Partial()" if placement.reduce_op == "sum" else f'Partial("{placement.reduce_op}")'
    return repr(placement)


def interleaved_shard(dim: int, parts: int, name: str) -> Placement:
    """Makes ragged-shard's InterleavedShard, which shards each part of a fused projection.

    Args:
        dim: the dim of the parameter that concatenates the parts.
        parts: 3 for fused queries, keys and values, 2 for a fused gate and up projection.
        name: of the plan, for messages.

    Raises:
        ImportError: ragged-shard is not installed.
    """
    try:
        from ragged_shard import InterleavedShard
    except ImportError as error:
        raise ImportError(
            f"zoo.{name}: expected a placement that shards each of the {parts} parts of a fused "
            f"projection, which torch's DTensor does not have: pip install plan-api[ragged]"
        ) from error
    return InterleavedShard(dim, parts)


def can_have_units(placement: Placement) -> bool:
    """Whether `shard_of_units` takes a placement: Shard, or InterleavedShard without units."""
    return type(placement) is Shard or getattr(placement, "unit", 0) == 1


def shard_of_units(placement: Placement, unit: int) -> Placement:
    """Makes ragged-shard's InterleavedShard of a dim that consists of units of a size.

    Args:
        placement: Shard, or InterleavedShard without units.
        unit: the size of a unit, such as a head.

    Raises:
        ValueError: ragged-shard is not installed.
    """
    try:
        from ragged_shard import InterleavedShard
    except ImportError as error:
        raise ValueError(
            f"expected ragged-shard for units of {unit} that the axis does not divide, as ranks "
            f"have different numbers of them, which torch's DTensor does not have: pip install "
            f"plan-api[ragged]"
        ) from error
    parts: int = getattr(placement, "interleaves", 1)
    return InterleavedShard(placement.dim, parts, unit)  # type: ignore[attr-defined]
