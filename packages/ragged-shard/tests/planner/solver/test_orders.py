"""The orders by name, by permutation and by function, and what is said of bad ones."""

import re

import numpy as np
import pytest

from ragged_shard.planner import TensorSpec, plan_layout

SPECS = [
    TensorSpec("norm", 8),
    TensorSpec("down", 96, 12, (8, 12)),
    TensorSpec("up", 96, 8, (12, 8)),
    TensorSpec("router", 24, 8, (3, 8)),
    TensorSpec("bias", 12, 12, (12,)),
]


def names(order):
    layout = plan_layout(SPECS, 3, order=order)
    assert [layout.starts[i] for i in layout.order] == sorted(layout.starts)
    return [layout.specs[i].name for i in layout.order]


def test_the_given_order_is_kept():
    assert names("given") == ["norm", "down", "up", "router", "bias"]


def test_by_block_the_largest_block_comes_first_then_the_largest_tensor():
    assert names("block") == ["down", "bias", "up", "router", "norm"]


def test_by_shape_the_largest_shape_comes_first_and_no_shape_counts_as_flat():
    assert names("shape") == ["up", "bias", "down", "norm", "router"]


def test_equals_keep_the_given_order():
    specs = [TensorSpec(f"t{i}", 6, 2, (3, 2)) for i in range(5)]
    for order in ("block", "shape", "best"):
        assert plan_layout(specs, 2, order=order).order == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("order", [[4, 2, 0, 1, 3], (4, 2, 0, 1, 3), lambda specs: [4, 2, 0, 1, 3]])
def test_a_permutation_or_a_function_that_returns_one_is_followed(order):
    assert names(order) == ["bias", "up", "norm", "down", "router"]


def test_a_function_sees_the_specs():
    assert names(lambda specs: sorted(range(len(specs)), key=lambda i: specs[i].name)) == [
        "bias",
        "down",
        "norm",
        "router",
        "up",
    ]


BAD = [
    ("largest", "order: expected one of given, block, shape, best... got 'largest'"),
    ([0, 1, 2, 3], "order: expected ...got 4 indices, of which [4] are missing"),
    ([0, 1, 2, 3, 5], "of which [4, 5] are missing"),
    ([0, 1, 2, 3, 4, 4], "order: expected ...got 6 indices, of which [4] are missing"),
    ([0, 1, 2, 3, -1], "of which [-1, 4]"),
    ([0, 1, 2, 3, 4.0], "order: expected integers... got 4.0"),
    (7, "order: expected a sequence... got 7"),
    ({0, 1, 2, 3, 4}, "order: expected a sequence... got {0, 1, 2, 3, 4}"),
    (lambda specs: "given", "order's result: expected a sequence... got 'given'"),
    (lambda specs: [0], "order's result: expected ...got 1 indices"),
]


@pytest.mark.parametrize(("order", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_orders_are_named(order, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        plan_layout(SPECS, 3, order=order)


def test_places_of_other_integer_types_become_ints():
    layout = plan_layout(SPECS, 3, order=list(np.arange(4, -1, -1)))
    assert layout == plan_layout(SPECS, 3, order=[4, 3, 2, 1, 0])
    assert {type(place) for place in layout.order} == {int}
