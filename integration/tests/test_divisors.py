"""Degrees that do not divide a model's sizes, with those that would."""

import pytest

from integration.errors import UsageError
from integration.models import model_shape
from integration.systems import Degrees
from integration.systems.divisors import alternatives, divisors, require_divisors


def test_divisors_and_their_text():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert [alternatives(each) for each in ([1], [1, 2], [1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


def test_degrees_that_fit_divide_all_sizes_and_are_among_those_that_the_ranks_allow():
    shape = model_shape("llama-10m")  # 8 heads, 4 key-value heads
    fields = ("num_attention_heads", "num_key_value_heads")
    require_divisors(shape, fields, "--tp", 4, [1, 2, 4])
    with pytest.raises(
        UsageError,
        match=r"^--tp 8: expected a divisor of num_key_value_heads = 4, got 8; --tp 1 or 4 would",
    ):
        require_divisors(shape, fields, "--tp", 8, [1, 4, 8])


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        (Degrees(), {"dp": 1}),
        (Degrees(dp_replicate=2, dp_shard=2, cp=2, tp=2), {"dp": 4, "cp": 2, "tp": 2}),
        (Degrees(dp_shard=4, ep=2, tp=2), {"dp": 2, "ep": 2, "tp": 2}),
        (Degrees(dp_replicate=2, dp_shard=2, ep=2), {"dp": 2, "ep": 2}),
        (Degrees(dp_replicate=4, ep=2), {"dp": 2, "ep": 2}),
        (Degrees(dp_shard=2, ep=2), {"ep": 2}),
        (Degrees(dp_shard=2, cp=2, ep=2, tp=2), {"ep": 2, "cp": 2, "tp": 2}),
        (Degrees(dp_shard=4, cp=2, ep=4), {"ep": 4, "cp": 2}),
        (Degrees(dp_shard=2, cp=2, ep=4), {"ep": 2, "cp": 2}),
        (Degrees(cp=2, ep=2, tp=2), {"cp": 2, "tp": 2}),
        (Degrees(dp_shard=3, ep=2, tp=2), {"dp": 3, "tp": 2}),
        (Degrees(ep=2, tp=2), {"tp": 2}),
    ],
    ids=str,
)
def test_the_mesh_has_the_experts_ranks_within_one_replica(degrees, axes):
    assert list(degrees.axes.items()) == list(axes.items())
    degrees.check(degrees.data * degrees.cp * degrees.tp)
