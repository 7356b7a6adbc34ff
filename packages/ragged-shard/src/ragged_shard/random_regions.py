"""Registers the placements of this package with dist-rng, without importing it.

For an unknown placement dist-rng loads the entry points ``dist_rng.placements`` (pyproject.toml)
and calls `register`. Its regions accept objects with ``start``, ``stop`` and a length, such as a
`range`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.geometry.specs import any_custom
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.strided import StridedRaggedShard


def register(register_placement: Callable[..., None]) -> None:
    """Registers the regions of the placements of this package.

    Args:
        register_placement: `dist_rng.register_placement`.
    """
    register_placement(RaggedShard, _ragged, last=True)
    register_placement(StridedRaggedShard, _ragged, last=True)
    register_placement(InterleavedShard, _interleaved)


def _ragged(region: Any, placement: RaggedShard, axis_size: int, axis_rank: int) -> Any:
    placement.check(region.grid_shape, axis_size)
    return region.within(placement.interval(region.grid_shape, axis_rank))


def _interleaved(region: Any, placement: InterleavedShard, axis_size: int, axis_rank: int) -> Any:
    shape = region.grid_shape
    placement.check(shape)
    shard, chunk = placement.piece(shape, axis_size, axis_rank), placement.chunk(shape)
    pieces = (
        range(index * chunk + shard.start, index * chunk + shard.stop)
        for index in range(placement.interleaves)
    )
    return region.select(placement.dim, *(piece for piece in pieces if piece))


def distribute_region(
    native: Callable[..., Any], tracker: object, spec: DTensorSpec, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `OffsetBasedRNGTracker._distribute_region`, which torch's random operators call.

    Raises:
        RuntimeError: a placement is of this package; torch would draw the same numbers on every
            rank, as for Replicate.
    """
    if any_custom(spec.placements):
        raise random_refused("torch.distributed.tensor", spec.placements)
    return native(tracker, spec, *args, **kwargs)


def random_refused(name: str, placements: Sequence[Placement]) -> RuntimeError:
    """Returns the error of drawing random numbers without dist-rng."""
    return RuntimeError(
        f"{name}: torch cannot draw random numbers for placements {tuple(placements)}; install "
        f"dist-rng and call dist_rng.install(), which draws the numbers of one device"
    )
