"""A sweep as JSON."""

import json

from ragged_shard.planner.command_line.output import to_json
from ragged_shard.planner.command_line.sweep import SweepSettings, recommend, sweep
from ragged_shard.planner.models.shapes import ModelShapes, ParameterGroup, ParameterShape

MODEL = ModelShapes(
    "toy",
    (
        ParameterGroup("layers.0", (ParameterShape("experts", (7, 6), "expert"),)),
        ParameterGroup("root", (ParameterShape("norm", (4,), "other"),)),
    ),
)
SETTINGS = SweepSettings("experts", alignment=2)


def test_every_figure_is_there():
    points = sweep(MODEL, (2, 4), (4,), SETTINGS)
    found = json.loads(to_json(MODEL, SETTINGS, points, recommend(points)))
    listed = found.pop("points")
    assert found == {
        "version": 1,
        "model": "toy",
        "parameters": 46,
        "rows_apply_to": "experts",
        "order": "given",
        "alignment": 2,
        "recommended": [{"rows": 4, "world_size": 2}],
    }
    # 7 rows in blocks of 4: 24 of 42 elements on one of two ranks, 4 vectors on two.
    assert listed[0] == {
        "rows": 4,
        "world_size": 2,
        "shard_size": 24 + 2,
        "padding": 6,
        "padding_ratio": 6 / 46,
        "exact": True,
        "worst_group": "layers.0",
        "groups": [
            {
                "name": "layers.0",
                "total": 42,
                "shard_size": 24,
                "padding": 6,
                "proved_lower_bound": 24,
                "exact": True,
                "alike": 1,
                "padding_ratio": 6 / 42,
            },
            {
                "name": "root",
                "total": 4,
                "shard_size": 2,
                "padding": 0,
                "proved_lower_bound": 2,
                "exact": True,
                "alike": 1,
                "padding_ratio": 0,
            },
        ],
    }
    assert [(point["rows"], point["world_size"]) for point in listed] == [(4, 2), (4, 4)]


def test_nothing_is_recommended_unasked():
    points = sweep(MODEL, (2,), (4,), SETTINGS)
    assert json.loads(to_json(MODEL, SETTINGS, points))["recommended"] == []
