"""Placements as text, and the placement of fused projections."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["format_placement", "interleaved_shard", "placement_code"]


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
