"""The ways to split the tokens of routers, which the tests of this folder compare."""

import math

import pytest

# By name: the mesh, its axes, and the options of a plan of the zoo.
SPLITS = {
    "data": ((2,), ("dp",), {"tp": None, "dp": "dp"}),
    "data, dispatched": ((2,), ("dp",), {"tp": None, "dp": "dp", "ep": "dp"}),
    "experts along tp": ((2,), ("tp",), {"ep": "tp"}),
    "sequences": ((2,), ("tp",), {"sp": True}),
    "sequences, dispatched": ((2,), ("tp",), {"sp": True, "ep": "tp"}),
    "both, dispatched along tp": ((2, 2), ("dp", "tp"), {"dp": "dp", "sp": True, "ep": "tp"}),
    "both, dispatched": ((2, 2), ("dp", "tp"), {"dp": "dp", "sp": True, "ep": ("dp", "tp")}),
}


@pytest.fixture
def cases(ranks):
    """The splits over the test's number of ranks."""
    return [split for split in SPLITS.values() if math.prod(split[0]) == ranks]
