"""A sweep as JSON, for other programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ragged_shard.planner.model import Model
from ragged_shard.planner.recommend import Recommendation
from ragged_shard.planner.sweep import Point, Settings

#: Raised when a key changes its meaning or goes; new keys do not raise it.
VERSION = 1


def to_json(
    model: Model,
    settings: Settings,
    points: Sequence[Point],
    recommendations: Sequence[Recommendation] = (),
) -> str:
    """All figures of a sweep as a JSON object; sizes in elements, ratios as shares of one.

    Args:
        model: The model that was swept.
        settings: The settings it was swept with.
        points: The sweep.
        recommendations: What was recommended, if that was asked for.
    """
    found = {
        "version": VERSION,
        "model": model.name,
        "parameters": model.numel,
        "rows_apply_to": settings.target,
        "order": settings.order,
        "alignment": settings.alignment,
        "points": [_point(point) for point in points],
        "recommended": [
            {"rows": item.point.rows, "world_size": item.point.world_size}
            for item in recommendations
        ],
    }
    return json.dumps(found, indent=2)


def _point(point: Point) -> dict[str, Any]:
    return {
        "rows": point.rows,
        "world_size": point.world_size,
        "shard_size": point.shard_size,
        "padding": point.padding,
        "padding_ratio": point.padding_ratio,
        "exact": point.exact,
        "worst_group": point.worst.name,
        "groups": [
            asdict(group) | {"padding_ratio": group.padding_ratio} for group in point.groups
        ],
    }
