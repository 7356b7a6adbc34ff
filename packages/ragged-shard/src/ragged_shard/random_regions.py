"""Random numbers for the placements of this package: by dist-rng, and without it.

With dist-rng ranks draw the numbers of one device. It is not imported here: for an unknown
placement it loads the entry points ``dist_rng.placements`` (pyproject.toml) and calls `register`.
Its regions accept objects with ``start``, ``stop`` and a length, such as a `range`.

Without dist-rng initializers draw as torch draws for a Shard: each rank its own elements, on the
CPU with the rank's generator, on accelerators at an offset of the stream that its shard has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.geometry.specs import any_custom, is_custom, with_placements
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.strided import StridedRaggedShard

#: Operators that fill a tensor; with a list of operands, or as dropout, they need dist-rng.
INITIALIZERS = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"}
)
LIKE = frozenset({"rand_like", "randn_like"})

_warned = False


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


def draw_as_shards(
    native: Callable[..., Any], tracker: object, spec: DTensorSpec, *args: Any, **kwargs: Any
) -> Any:
    """Replaces methods of `OffsetBasedRNGTracker`, which accelerators' random operators call.

    torch takes unknown placements for Replicate, and would draw the same numbers on every rank.
    """
    if any_custom(spec.placements):
        spec = with_placements(spec, tuple(_as_shard(p, spec.ndim) for p in spec.placements))
    return native(tracker, spec, *args, **kwargs)


def _as_shard(placement: Placement, ndim: int) -> Placement:
    """Returns the placement of torch whose shards' numbers a rank draws."""
    if not is_custom(placement):
        return placement
    dim = placement.dim if isinstance(placement, InterleavedShard) else 0
    return Shard(dim) if ndim else Replicate()


def warn_of_own_numbers(name: str) -> None:
    """Warns, once in a process, that numbers are not those of one device.

    Args:
        name: of the operator.
    """
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{name}: each rank draws the numbers of its own shard, so they depend on the number "
            f"of ranks, and on the CPU shards repeat where ranks have the same seed; install "
            f"dist-rng and call dist_rng.install(), which draws the numbers of one device",
            stacklevel=2,
        )


def random_refused(name: str, placements: Sequence[Placement]) -> RuntimeError:
    """Returns the error of drawing random numbers without dist-rng."""
    return RuntimeError(
        f"{name}: torch cannot draw these numbers for placements {tuple(placements)}; install "
        f"dist-rng and call dist_rng.install(), which draws the numbers of one device"
    )
