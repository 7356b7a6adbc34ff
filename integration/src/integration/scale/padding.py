"""The planner's padding of each model, by how many ranks fully_shard cuts it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragged_shard.planner.blocks import resolve_target
from ragged_shard.planner.presets import preset_model
from ragged_shard.planner.sweep import Settings, sweep

__all__ = ["ROWS", "Padding", "paddings"]

ROWS = (1, 16, 128)


@dataclass(frozen=True)
class Padding:
    """Padding of one model.

    Attributes:
        model: the preset's name.
        rows: of experts' matrices, or of all where there are no experts, that are never cut.
        ranks: that the groups are cut over.
        share: padding over the model's elements.
    """

    model: str
    rows: int
    ranks: int
    share: float


def paddings(model: str, ranks: Sequence[int], rows: Sequence[int] = ROWS) -> list[Padding]:
    """Plans every group of a preset, a group per layer, tensors as they are published.

    Raises:
        ValueError: as of the planner.
    """
    planned = preset_model(model)
    settings = Settings(resolve_target(planned, None))
    return [
        Padding(model, point.rows, point.world_size, point.padding_ratio)
        for point in sweep(planned, ranks, rows, settings)
    ]
