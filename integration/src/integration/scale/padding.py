"""Computes the planner's padding of each model, by the number of ranks of fully_shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragged_shard.planner.command_line.sweep import SweepSettings, sweep
from ragged_shard.planner.models.presets import preset_model
from ragged_shard.planner.models.shapes import resolve_target

__all__ = ["ROWS", "Padding", "paddings"]

ROWS = (1, 16, 128)


@dataclass(frozen=True)
class Padding:
    """Padding of one model.

    Attributes:
        model: name of the preset.
        rows: rows per block, of experts' matrices or, without experts, of all matrices.
        ranks: number of ranks that parameter groups are sharded over.
        share: padding over the model's elements.
    """

    model: str
    rows: int
    ranks: int
    share: float


def paddings(model: str, ranks: Sequence[int], rows: Sequence[int] = ROWS) -> list[Padding]:
    """Plans every parameter group of a preset, one per layer, with the published tensors.

    Raises:
        ValueError: as in the planner.
    """
    planned = preset_model(model)
    settings = SweepSettings(resolve_target(planned, None))
    return [
        Padding(model, point.rows, point.world_size, point.padding_ratio)
        for point in sweep(planned, ranks, rows, settings)
    ]
