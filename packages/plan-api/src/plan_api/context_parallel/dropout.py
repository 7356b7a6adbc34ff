"""Dropout of attention weights, with the mask that one device draws.

On a CPU torch draws a number for each attention weight of (batch, heads, queries, keys). dist-rng
draws those of any part, without the others, so each tile has its part of one device's mask; and
backward draws it again from the state of the generator before the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plan_api.context_parallel.order import Positions, within
from plan_api.context_parallel.tiles import AttentionTile

__all__ = ["AttentionDropout", "DropoutMasks"]

_BATCH, _HEADS, _QUERIES, _KEYS = range(4)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the attention weights of a call.

    Attributes:
        p: the probability of a weight to become zero, above 0 and at most 1.
        weights: the `dist_rng.Region` of this rank's weights, with all queries and keys of the
            sequence: batch and heads may be sharded.
    """

    p: float
    weights: Any

    def of_heads(self, start: int, stop: int) -> AttentionDropout:
        """Returns the dropout of some of this rank's heads."""
        from dist_rng import IndexRange

        return AttentionDropout(self.p, self.weights.select(_HEADS, IndexRange(start, stop)))


class DropoutMasks:
    """Draws one call's masks tile by tile.

    Args:
        dropout: of the call.
        state: of the CPU's generator before the call.
    """

    def __init__(self, dropout: AttentionDropout, state: torch.Tensor) -> None:
        self._dropout, self._state = dropout, state

    @classmethod
    def begin(cls, dropout: AttentionDropout) -> DropoutMasks:
        """Starts a call, and advances the generator by what one device draws."""
        state = torch.get_rng_state()
        if dropout.p < 1.0:
            from dist_rng import bernoulli_

            empty = dropout.weights.select(_KEYS)
            bernoulli_(torch.empty(empty.grid_shape), empty, 1.0 - dropout.p)
        return cls(dropout, state)

    @property
    def state(self) -> torch.Tensor:
        """The state of the generator before the call."""
        return self._state

    def factors(
        self, tile: AttentionTile, queries: Positions, keys: Positions, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns what the weights of a tile are multiplied by: 0, or 1 / (1 - p).

        Args:
            tile: without padding.
            queries: positions of the queries that the tile is of.
            keys: positions of the keys that the tile is of.
            dtype: of the result, (batch, heads, queries, keys).
        """
        from dist_rng import IndexRange, bernoulli_

        weights = self._dropout.weights
        if tile.rows != slice(None):
            weights = weights.select(_BATCH, IndexRange(tile.rows.start, tile.rows.stop))
        for dim, positions in (
            (_QUERIES, within(queries, tile.queries)), (_KEYS, within(keys, tile.keys)),
        ):  # fmt: skip
            weights = weights.select(dim, *(IndexRange(*one) for one in positions))
        result = torch.zeros(weights.grid_shape, dtype=dtype)
        if self._dropout.p < 1.0:
            generator = torch.Generator()
            generator.set_state(self._state)
            bernoulli_(result, weights, 1.0 - self._dropout.p, generator=generator)
            result /= 1.0 - self._dropout.p
        return result
