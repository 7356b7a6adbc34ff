"""TensorSpec: what it takes, and what it says of bad input."""

import re

import numpy as np
import pytest

from ragged_shard.planner import TensorSpec, plan_layout

MOST = 2**63 - 1


@pytest.mark.parametrize(
    "values",
    [
        {"numel": 1},
        {"numel": 0, "block": 7},
        {"numel": MOST, "block": MOST},
        {"numel": 10, "block": 3},
        {"numel": 6, "block": 6, "shape": (2, 3)},
        {"numel": 1, "shape": ()},
        {"numel": 0, "shape": (3, 0)},
    ],
    ids=["one", "empty", "largest", "uneven last block", "whole", "scalar", "empty with a shape"],
)
def test_good_values_are_kept(values):
    spec = TensorSpec("w", **values)
    assert {name: getattr(spec, name) for name in values} == values


def test_a_list_as_shape_becomes_a_tuple():
    assert TensorSpec("w", 6, shape=[2, 3]) == TensorSpec("w", 6, shape=(2, 3))


BAD = [
    ({"name": 3, "numel": 1}, "TensorSpec name: expected ...got 3"),
    ({"numel": -1}, "'w' numel: expected ...got -1"),
    ({"numel": 1.0}, "'w' numel: expected ...got 1.0 of type float"),
    ({"numel": "8"}, "'w' numel: expected ...got '8' of type str"),
    ({"numel": 2**63}, f"'w' numel: expected ...got {2**63}"),
    ({"numel": 8, "block": 0}, "'w' block: expected ...got 0"),
    ({"numel": 8, "block": -2}, "'w' block: expected ...got -2"),
    ({"numel": 8, "block": 2.5}, "'w' block: expected ...got 2.5 of type float"),
    ({"numel": 8, "block": 9}, "'w' block: expected at most 8... got 9"),
    ({"numel": 0, "block": 0}, "'w' block: expected ...got 0"),
    ({"numel": 6, "shape": (2, 2)}, "'w' shape: expected a shape of numel=6... got (2, 2) of 4"),
    ({"numel": 6, "shape": (-2, -3)}, "'w' shape: expected ...got -2"),
    ({"numel": 6, "shape": (2, 3.0)}, "'w' shape: expected ...got 3.0"),
    ({"numel": 6, "shape": 6}, "'w' shape: expected a tuple... got 6"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        TensorSpec(**{"name": "w", **values})


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.array], ids=repr)
def test_integers_of_other_types_become_ints(integer):
    spec = TensorSpec("w", integer(6), integer(2), [integer(2), integer(3)])
    assert spec == TensorSpec("w", 6, 2, (2, 3))
    assert {type(n) for n in (spec.numel, spec.block, *spec.shape)} == {int}
    layout = plan_layout([spec], integer(2), alignment=integer(1), node_limit=integer(100))
    assert layout == plan_layout([TensorSpec("w", 6, 2, (2, 3))], 2, node_limit=100)
    assert {type(n) for n in (layout.world_size, layout.alignment, layout.shard_size)} == {int}
