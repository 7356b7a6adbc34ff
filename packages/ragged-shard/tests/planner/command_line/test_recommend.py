"""Which world size is proposed."""

import pytest

from ragged_shard.planner.command_line.sweep import GroupPlan, SweepPoint, recommend


def point(world_size, padding, rows=16):
    shard = (10_000 + padding) // world_size
    group = GroupPlan("layers.0", 10_000, shard, padding, shard, exact=True, identical=1)
    return SweepPoint(world_size, rows, (group,))


def proposed(*points, tolerance=0.0):
    return [item.point.world_size for item in recommend(points, tolerance=tolerance)]


def test_the_least_padding_is_proposed():
    assert proposed(point(8, 30), point(16, 10), point(32, 20)) == [16]


def test_of_equals_the_largest_is_proposed_whatever_their_order():
    assert proposed(point(8, 10), point(32, 10), point(16, 10)) == [32]
    assert recommend([point(8, 10), point(32, 10)])[0].least.world_size == 32


def test_within_the_tolerance_sizes_count_as_equal():
    points = (point(8, 0), point(16, 100), point(32, 101))
    assert proposed(*points, tolerance=0.01) == [16]
    assert proposed(*points, tolerance=0.0101) == [32]


def test_there_is_a_proposal_for_every_granularity_in_order():
    points = (point(8, 5, rows=128), point(16, 9, rows=128), point(8, 5, 1), point(16, 5, 1))
    found = recommend(points)
    assert [(item.point.rows, item.point.world_size) for item in found] == [(128, 8), (1, 16)]


def test_the_sentence_says_what_is_proposed_and_what_has_the_least():
    (best,) = recommend([point(8, 10), point(16, 90)])
    assert best.sentence() == (
        "16 rows: shard over 8 ranks, 0.100 % padding, 1,251 elements per rank; no size has less."
    )
    (larger,) = recommend([point(8, 10, 1), point(16, 90, 1)], tolerance=0.01)
    assert larger.sentence() == (
        "1 row: shard over 16 ranks, 0.900 % padding, 630 elements per rank; 8 ranks have the "
        "least, 0.100 %, which is within the tolerance of 1.000 %."
    )


def test_no_points_and_negative_tolerances_are_refused():
    with pytest.raises(ValueError, match="points: expected at least one"):
        recommend([])
    for wrong in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=f"tolerance: expected .* got {wrong}"):
            recommend([point(8, 10)], tolerance=wrong)
