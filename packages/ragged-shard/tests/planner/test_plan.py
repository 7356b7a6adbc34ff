"""plan_layout: alignment, limits, sizes from nothing to 100,000 ranks, and bad input."""

import random
import re

import pytest

from ragged_shard.planner import TensorSpec, plan_layout, verify

MOST = 2**63 - 1


def specs_of(*sizes):
    return [TensorSpec(f"t{i}", numel, block) for i, (numel, block) in enumerate(sizes)]


def brute_aligned(specs, ranks, alignment):
    """The smallest shard with aligned starts: every block at every aligned start, by looking."""
    shard = 0 if all(spec.numel == 0 for spec in specs) else alignment
    while shard:
        ends = {0}
        for spec in specs:
            ends = {
                start + spec.numel
                for end in ends
                for start in range(-(-end // alignment) * alignment, ranks * shard, alignment)
                if start + spec.numel <= ranks * shard
                if all(
                    (start + first) // shard
                    == (start + min(first + spec.block, spec.numel) - 1) // shard
                    for first in range(0, spec.numel, spec.block)
                )
            }
        if ends:
            break
        shard += alignment
    return shard


def test_aligned_starts_have_the_shard_that_brute_force_finds():
    draw = random.Random(0)
    for _ in range(1_500):
        sizes = []
        for _ in range(draw.randint(0, 5)):
            numel = draw.choice([draw.randint(1, 16), draw.randint(1, 16), 1])
            sizes.append((numel, draw.choice([1, numel, draw.randint(1, numel)])))
        specs, ranks, alignment = specs_of(*sizes), draw.randint(1, 6), draw.randint(1, 6)
        layout = plan_layout(specs, ranks, alignment=alignment, align_starts=True)
        verify(layout)
        assert layout.shard_size == brute_aligned(specs, ranks, alignment), (specs, ranks)


def test_alignment_binds_the_shard_and_align_starts_the_starts():
    specs = specs_of((3, 1), (3, 1), (3, 1))
    assert plan_layout(specs, 2).shard_size == 5
    shard_only = plan_layout(specs, 2, alignment=4)
    assert (shard_only.shard_size, shard_only.starts) == (8, (0, 3, 6))
    starts_too = plan_layout(specs, 2, alignment=4, align_starts=True)
    assert (starts_too.shard_size, starts_too.starts) == (8, (0, 4, 8))


def test_an_owner_holds_the_whole_of_a_tensor_whose_block_is_all_of_it():
    layout = plan_layout(specs_of((6, 6), (5, 5), (4, 4), (3, 3)), 3)
    assert layout.shard_size == 7
    assert [list(layout.owners(i)) for i in range(4)] == [[0], [1], [2], [2]]


def test_an_uneven_last_block_is_not_cut_either():
    layout = plan_layout(specs_of((10, 4)), 2)
    assert layout.shard_size == 6  # 4 and 4 + 2, behind 2 elements of padding
    assert layout.starts == (2,)
    assert layout.units(0) == (2, 3)


def test_more_ranks_than_elements_leave_ranks_empty():
    layout = plan_layout(specs_of((3, 1), (0, 1), (2, 2)), 9)
    assert layout.shard_size == 2
    assert [len(layout.parts(rank)) for rank in range(9)] == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_nothing_needs_nothing():
    for specs in ([], specs_of((0, 1), (0, 5))):
        layout = plan_layout(specs, 4, alignment=8, align_starts=True)
        verify(layout)
        assert (layout.shard_size, layout.padding, layout.exact) == (0, 0, True)
        assert layout.parts(3) == ()
        assert layout.padding_ratio == 0


def test_thousands_of_tensors_on_100000_ranks():
    draw = random.Random(1)
    sizes = []
    for _ in range(2_000):
        rows, row = draw.randint(1, 4096), draw.choice([512, 1024, 7168])
        sizes.append((rows * row, min(rows, draw.choice([1, 16])) * row))
    layout = plan_layout(specs_of(*sizes), 100_000)
    verify(layout)
    assert layout.exact
    assert sum(layout.units(7)) * layout.unit_size(7) == sizes[7][0]
    allocated = sum(part.interval.size for rank in range(100_000) for part in layout.parts(rank))
    assert allocated == layout.total


def hard():
    """A group that takes the search thousands of nodes: many small blocks that differ."""
    draw = random.Random(26)
    sizes = [(draw.randint(10**6, 3 * 10**7), draw.randint(1, 50)) for _ in range(18)]
    return specs_of(*sizes)


def test_a_search_that_gives_up_says_so_and_what_it_proved():
    exact = plan_layout(hard(), 24)
    gave_up = plan_layout(hard(), 24, node_limit=5)
    verify(gave_up)
    assert exact.exact
    assert not gave_up.exact
    assert gave_up.proved_lower_bound <= exact.shard_size < gave_up.shard_size
    assert exact.proved_lower_bound == exact.shard_size


def test_specs_may_come_from_a_generator():
    specs = specs_of((7, 2), (5, 1))
    assert plan_layout((spec for spec in specs), 2) == plan_layout(specs, 2)


def test_specs_are_kept_as_given_whatever_the_order():
    specs = specs_of((7, 2), (5, 1), (9, 3))
    layout = plan_layout(specs, 2, order=[2, 0, 1])
    assert layout.specs == tuple(specs)
    assert layout.order == (2, 0, 1)
    assert layout.starts[2] == 0


ONE = specs_of((8, 2))
BAD = [
    ({"specs": 5}, "specs: expected a sequence of TensorSpec... got 5"),
    ({"specs": [("a", 1)]}, "specs[0]: expected a TensorSpec... got ('a', 1)"),
    (
        {"specs": specs_of((MOST, 1), (1, 1))},
        f"specs: expected at most 2**63 - 1... got {2**63} up to 't1' of 1",
    ),
    ({"world_size": 0}, "world_size: expected 1... got 0"),
    ({"world_size": -4}, "world_size: expected ...got -4"),
    ({"world_size": 2.0}, "world_size: expected ...got 2.0 of type float"),
    ({"alignment": 0}, "alignment: expected 1... got 0"),
    ({"alignment": 1.5}, "alignment: expected ...got 1.5"),
    ({"alignment": 2**63}, f"alignment: expected ...got {2**63}"),
    ({"align_starts": 1}, "align_starts: expected True or False... got 1"),
    ({"node_limit": 0}, "node_limit: expected ...got 0"),
    ({"order": "size"}, "order: expected one of given, block, shape, best... got 'size'"),
    ({"order": None}, "order: expected ...got None"),
    (
        {"specs": specs_of((MOST, 1)), "alignment": 4, "align_starts": True},
        "specs: expected at most 2**63 - 1 elements... in 1 tensors rounded up to the alignment 4",
    ),
    (
        {"specs": specs_of((2**62, 2**62)), "world_size": 2},
        "world_size: expected ...got ... on 2 ranks with alignment 1",
    ),
    (
        {"alignment": MOST, "world_size": 2},
        f"world_size: ... with alignment {MOST}",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        plan_layout(**{"specs": ONE, "world_size": 2, **arguments})
