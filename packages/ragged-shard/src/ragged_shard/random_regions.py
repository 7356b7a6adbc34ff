"""What our placements hold, said in dist-rng's words, without importing it.

dist-rng looks for the entry points ``dist_rng.placements`` (pyproject.toml) when it meets a
placement that it does not know, and calls `register`. Its regions take anything with ``start``,
``stop`` and a length for a piece: a `range`.
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
    """Tells dist-rng what the placements of this package hold.

    Args:
        register_placement: dist_rng's function of this name.
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
    mine, chunk = placement.piece(shape, axis_size, axis_rank), placement.chunk(shape)
    pieces = (
        range(index * chunk + mine.start, index * chunk + mine.stop)
        for index in range(placement.interleaves)
    )
    return region.select(placement.dim, *(piece for piece in pieces if piece))


def distribute_region(
    native: Callable[..., Any], tracker: object, spec: DTensorSpec, *args: Any, **kwargs: Any
) -> Any:
    """`OffsetBasedRNGTracker._distribute_region`, behind torch's random numbers for DTensors.

    Raises:
        RuntimeError: a placement of this package, for which torch would draw the numbers of a
            replica on every rank.
    """
    if any_custom(spec.placements):
        raise random_refused("torch.distributed.tensor", spec.placements)
    return native(tracker, spec, *args, **kwargs)


def random_refused(name: str, placements: Sequence[Placement]) -> RuntimeError:
    """The error of drawing random numbers without dist-rng."""
    return RuntimeError(
        f"{name}: torch by itself cannot draw random numbers for placements {tuple(placements)}; "
        f"install dist-rng and call dist_rng.install(), which draws what one device would"
    )
