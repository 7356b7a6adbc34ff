"""balance: the same shards at other ranks, the busiest of whom has as little to do as can be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_shard.planner import TensorSpec, balance, plan_layout, verify
from ragged_shard.planner.balance import work_of_shards

amounts = st.integers(0, 9)


@st.composite
def questions(draw):
    specs = []
    for i in range(draw(st.integers(0, 7))):
        numel = draw(st.integers(0, 20))
        specs.append(TensorSpec(f"t{i}", numel, draw(st.sampled_from([1, max(numel, 1)]))))
    ranks = draw(st.integers(1, 5))
    layout = plan_layout(
        specs,
        ranks,
        alignment=draw(st.integers(1, 3)),
        align_starts=draw(st.booleans()),
        order=draw(st.sampled_from(["given", "best"])),
    )
    work = draw(st.lists(amounts, min_size=len(specs), max_size=len(specs)))
    return layout, work, draw(st.lists(amounts, min_size=ranks, max_size=ranks))


def busiest(layout, work, busy):
    return max(map(sum, zip(work_of_shards(layout, work), busy, strict=True)))


def shards(layout):
    """What each rank holds, and where."""
    return [layout.parts(rank) for rank in range(layout.world_size)]


def sharing(layout):
    """Ranks that share a tensor with a neighbour."""
    owners = [layout.owners(i) for i in range(len(layout.specs))]
    return {rank for ranks in owners if len(ranks) > 1 for rank in ranks}


@given(questions())
def test_the_same_shards_lie_at_other_ranks(question):
    layout, work, busy = question
    found = balance(layout, work, busy)
    verify(found)
    assert found.shard_size == layout.shard_size
    assert sorted(shards(found), key=repr) == sorted(shards(layout), key=repr)
    assert all(found.parts(rank) == layout.parts(rank) for rank in sharing(layout))
    again = plan_layout(
        layout.specs,
        layout.world_size,
        alignment=layout.alignment,
        align_starts=layout.align_starts,
        order=found.order,
    )
    assert found.proved_lower_bound <= again.shard_size


@given(questions())
def test_no_other_order_of_the_shards_that_move_is_better(question):
    layout, work, busy = question
    found = balance(layout, work, busy)
    shared = sharing(layout)
    free = [rank for rank in range(layout.world_size) if rank not in shared]
    load = work_of_shards(layout, work)
    best = min(
        max(
            [load[rank] + busy[target] for rank, target in zip(free, targets, strict=True)]
            + [load[rank] + busy[rank] for rank in shared]
        )
        for targets in itertools.permutations(free)
    )
    assert busiest(found, work, busy) == best


def test_many_groups_of_few_large_tensors_are_balanced():
    layout = plan_layout([TensorSpec("a", 8, 8), TensorSpec("b", 6, 6)], 4)
    busy = [0] * 4
    for _ in range(20):
        found = balance(layout, [5, 3], busy)
        busy = [sum(pair) for pair in zip(busy, work_of_shards(found, [5, 3]), strict=True)]
    assert max(busy) <= 45  # an equal share is 40


def test_what_was_proved_of_the_order_before_is_not_claimed_of_the_new_one():
    specs = [TensorSpec("a", 4, 4), TensorSpec("b", 7, 7), TensorSpec("c", 6)]
    layout = plan_layout(specs, 2)
    found = balance(layout, [1, 2, 0], [2, 0])
    assert layout.proved_lower_bound > plan_layout(specs, 2, order=found.order).shard_size
    assert (found.proved_lower_bound, found.exact) == (layout.lower_bound, False)


def test_tensors_without_elements_do_not_stand_in_the_way():
    specs = [TensorSpec("a", 8, 8), TensorSpec("empty", 0), TensorSpec("b", 8, 8)]
    found = balance(plan_layout(specs, 2), [2, 0, 1], [2, 0])
    verify(found)
    assert found.starts == (8, 0, 0)


def test_a_layout_that_is_best_stays_as_it_is():
    layout = plan_layout([TensorSpec("a", 8, 8), TensorSpec("b", 6, 6)], 4)
    assert balance(layout, [5, 3], [0] * 4) is layout


def test_work_of_what_is_cut_does_not_count():
    layout = plan_layout([TensorSpec("cut", 8), TensorSpec("whole", 4, 4)], 4)
    assert work_of_shards(layout, [100, 7]) == [0, 0, 7, 0]


@pytest.mark.parametrize(
    ("work", "busy", "message"),
    [
        ([1], [0, 0], "work: expected 2 amounts, one per tensor, got 1"),
        ([1, 2], [0], "busy: expected 2 amounts, one per rank, got 1"),
        ([1, -2], [0, 0], "work: expected 0.* got -2"),
        ([1, 2], [0, 0.5], r"busy: expected an integer.* got 0.5 of type float"),
    ],
)
def test_other_amounts_are_refused(work, busy, message):
    layout = plan_layout([TensorSpec("a", 8, 8), TensorSpec("b", 6, 6)], 2)
    with pytest.raises(ValueError, match=message):
        balance(layout, work, busy)
