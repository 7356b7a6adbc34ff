"""verify: each constraint, broken one at a time."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_shard.planner import Layout, TensorSpec, verify

GOOD = Layout(
    specs=(TensorSpec("a", 10, 4), TensorSpec("b", 0), TensorSpec("c", 9, 9), TensorSpec("d", 3)),
    world_size=3,
    alignment=2,
    align_starts=True,
    order=(0, 1, 2, 3),
    starts=(2, 14, 20, 30),
    shard_size=20,
    proved_lower_bound=12,
    exact=False,
)


def test_a_good_layout_passes():
    verify(GOOD)


BROKEN = [
    (
        {"starts": (2, 14, 11, 30)},
        "tensor 2 ('c'): expected a start of 14 ...got 11",
    ),
    (
        {"order": (2, 0, 1, 3)},
        "tensor 0 ('a'): expected a start of 29 ...got 2",
    ),
    (
        {"starts": (2, 14, 20, 58)},
        "tensor 3 ('d'): expected an end of at most 60...got 61",
    ),
    (
        {"starts": (2, 14, 20, 31)},
        "tensor 3 ('d'): expected a start ... multiple of 2, got 31",
    ),
    (
        {"starts": (2, 13, 20, 30)},
        "tensor 1 ('b'): expected a start ... multiple of 2, got 13",
    ),
    (
        {"starts": (2, 14, 16, 30)},
        "tensor 2 ('c'): ...got one at 20 inside block 0, elements 16 to 25",
    ),
    (
        {"starts": (10, 20, 20, 30), "shard_size": 16, "world_size": 4},
        "tensor 0 ('a'): ...got one at 16 inside block 1, elements 14 to 18",
    ),
    (
        {"shard_size": 11, "alignment": 1, "proved_lower_bound": 0},
        "inside block 2, elements 10 to 12 of the",
    ),
    ({"starts": (2, 14, 20)}, "Layout starts: expected 4, one per spec... got 3"),
    ({"starts": (2, 14, 20, -1)}, "Layout starts: expected ...got -1"),
    ({"starts": (2, 14, 20, 30.0)}, "Layout starts: expected ...got 30.0 of type float"),
    ({"order": (0, 1, 2)}, "Layout order: expected each of 0 to 3 once... got (0, 1, 2)"),
    ({"order": (0, 1, 2, 2)}, "Layout order: expected each... got (0, 1, 2, 2)"),
    ({"order": (0, 1, 2, "3")}, "Layout order: expected ...got '3' of type str"),
    ({"shard_size": 21}, "Layout shard_size: expected a multiple of the alignment, 2... got 21"),
    ({"shard_size": -2}, "Layout shard_size: expected ...got -2"),
    ({"shard_size": 2**62}, f"Layout buffer_size: expected ...got {3 * 2**62}"),
    ({"world_size": 0}, "Layout world_size: expected ...got 0"),
    ({"alignment": 0}, "Layout alignment: expected ...got 0"),
    ({"align_starts": 1}, "Layout align_starts: expected a bool... got 1"),
    ({"exact": "no"}, "Layout exact: expected a bool... got 'no'"),
    ({"exact": True}, "Layout proved_lower_bound: expected ...got 12 with exact=True"),
    ({"proved_lower_bound": 22}, "Layout proved_lower_bound: expected ...got 22 with exact=False"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_layout_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        verify(replace(GOOD, **changes))


def test_a_boundary_behind_the_first_is_looked_at_too():
    layout = replace(
        GOOD,
        specs=(TensorSpec("a", 40, 4),),
        order=(0,),
        starts=(6,),
        shard_size=10,
        world_size=5,
        proved_lower_bound=8,
    )
    with pytest.raises(ValueError, match="got one at 20 inside block 3"):
        verify(layout)


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(0, 40),
    st.integers(1, 20),
    st.integers(1, 6),
)
def test_it_agrees_with_looking_at_every_block(numel, block, start, shard, world_size):
    block = min(block, numel)
    layout = Layout(
        specs=(TensorSpec("a", numel, block),),
        world_size=world_size,
        alignment=1,
        align_starts=False,
        order=(0,),
        starts=(start,),
        shard_size=shard,
        proved_lower_bound=0,
        exact=False,
    )
    good = start + numel <= shard * world_size and all(
        (start + first) // shard == (start + min(first + block, numel) - 1) // shard
        for first in range(0, numel, block)
    )
    if good:
        verify(layout)
    else:
        with pytest.raises(ValueError, match="tensor 0 \\('a'\\)"):
            verify(layout)
