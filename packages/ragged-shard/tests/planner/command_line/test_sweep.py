"""Plans of a whole model at many world sizes; the paper's figure 11."""

import pytest

from ragged_shard.planner import plan_layout, verify
from ragged_shard.planner.command_line.sweep import (
    GroupPlan,
    SweepPoint,
    SweepSettings,
    plan_group,
    sweep,
)
from ragged_shard.planner.models.presets import preset_model
from ragged_shard.planner.models.shapes import ModelShapes, ParameterGroup, ParameterShape, specs_of


def layer(name, height):
    return ParameterGroup(
        name,
        (ParameterShape("norm", (5,), "other"), ParameterShape("experts", (height, 6), "expert")),
    )


MODEL = ModelShapes("toy", (layer("layers.0", 7), layer("layers.1", 7), layer("root", 20)))


def direct(group, world_size, rows, **options):
    return plan_layout(specs_of(group, rows, "experts"), world_size, **options)


def test_every_group_of_every_point_is_what_the_planner_says_of_it():
    points = sweep(MODEL, (1, 2, 3), (1, 4), SweepSettings("experts"))
    assert [(point.rows, point.world_size) for point in points] == [
        (1, 1), (1, 2), (1, 3), (4, 1), (4, 2), (4, 3)
    ]  # fmt: skip
    for point in points:
        for group, plan in zip(MODEL.groups, point.groups, strict=True):
            layout = direct(group, point.world_size, point.rows)
            assert plan == GroupPlan(
                group.name,
                layout.total,
                layout.shard_size,
                layout.padding,
                layout.proved_lower_bound,
                layout.exact,
                identical=1 if group.name == "root" else 2,
            )


def test_groups_of_the_same_shapes_but_other_blocks_are_planned_apart():
    (point,) = sweep(MODEL, (4,), (7,), SweepSettings(r"layers\.0"))
    blocked, free, _ = point.groups
    assert (blocked.shard_size, free.shard_size) == (42, 12)
    assert (blocked.identical, free.identical) == (1, 1)


def test_a_point_sums_its_groups():
    (point,) = sweep(MODEL, (4,), (4,), SweepSettings("experts"))
    layouts = [direct(group, 4, 4) for group in MODEL.groups]
    assert point.shard_size == sum(layout.shard_size for layout in layouts)
    assert point.padding == sum(layout.padding for layout in layouts) > 0
    assert point.padding_ratio == point.padding / MODEL.numel
    assert point.worst.padding_ratio == max(layout.padding_ratio for layout in layouts)
    assert point.worst.name == "layers.0"


def test_a_gap_is_to_the_smallest_shard_that_may_be_possible():
    proved = GroupPlan("a", 90, 100, 10, 100, exact=True, identical=1)
    doubtful = GroupPlan("b", 90, 100, 10, 95, exact=False, identical=1)
    assert (SweepPoint(1, 1, (proved,)).gap, SweepPoint(1, 1, (proved,)).exact) == (0, True)
    point = SweepPoint(1, 1, (proved, doubtful))
    assert (point.gap, point.exact) == (pytest.approx(200 / 195 - 1), False)


def test_a_group_without_elements_has_no_share_of_padding():
    model = ModelShapes("toy", (ParameterGroup("empty", (ParameterShape("none", (0, 4)),)),))
    (point,) = sweep(model, (2,), (1,), SweepSettings("all"))
    assert (point.padding_ratio, point.worst.padding_ratio, point.gap) == (0, 0, 0)


def test_alignment_and_order_reach_the_planner():
    settings = SweepSettings("experts", order="block", alignment=32)
    (point,) = sweep(MODEL, (4,), (4,), settings)
    expected = [direct(group, 4, 4, order="block", alignment=32) for group in MODEL.groups]
    assert [plan.shard_size for plan in point.groups] == [each.shard_size for each in expected]
    assert all(plan.shard_size % 32 == 0 for plan in point.groups)
    layout = plan_group(MODEL, "root", point, settings)
    assert layout == expected[2]
    verify(layout)


@pytest.mark.parametrize(
    ("world_size", "rows", "order", "message"),
    [
        (0, 1, "given", "world_size"),
        (2, 0, "given", "rows: expected at least 1 row per block, got 0"),
        (2, 1, "random", "random"),
    ],
)
def test_numbers_and_orders_that_make_no_sense_are_refused(world_size, rows, order, message):
    with pytest.raises(ValueError, match=message):
        sweep(MODEL, (world_size,), (rows,), SweepSettings("experts", order))


FIGURE_11 = tuple(2**exponent for exponent in range(3, 11))  # 8 to 1,024 ranks


@pytest.mark.parametrize(
    ("preset", "rows", "most"),
    [
        ("deepseek-v3", 1, 0.03),
        ("deepseek-v3", 16, 0.03),
        ("gpt-oss-120b", 1, 0.03),
        ("gpt-oss-120b", 16, 0.03),
        ("gpt-oss-120b", 128, 0.18),
    ],
)
def test_padding_is_never_above_the_figures_of_the_paper(preset, rows, most):
    """veScale-FSDP, section 6.4 and figure 11: blocks in the experts' matrices only."""
    points = sweep(preset_model(preset), FIGURE_11, (rows,), SweepSettings("experts"))
    assert [point.world_size for point in points] == list(FIGURE_11)
    for point in points:
        assert point.exact
        assert 0 <= point.padding_ratio <= point.worst.padding_ratio <= most
