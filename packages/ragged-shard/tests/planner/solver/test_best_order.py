"""The order "best": never worse than the others, better where there is something to gain."""

import random
from itertools import permutations

import pytest

from ragged_shard.planner import TensorSpec, plan_layout, verify
from ragged_shard.planner.solver import search
from ragged_shard.planner.solver.reference import BlockedTensor
from ragged_shard.planner.solver.search import least_in_any_order


def specs_of(sizes):
    return [TensorSpec(f"t{i}", numel, block) for i, (numel, block) in enumerate(sizes)]


def random_specs(draw, number):
    sizes = []
    for _ in range(number):
        numel = draw.randint(1, 60)
        sizes.append((numel, draw.choice([1, numel, draw.randint(1, numel)])))
    return specs_of(sizes)


def test_it_is_never_worse_than_another_order_and_often_better():
    draw = random.Random(0)
    better = 0
    for _ in range(400):
        specs, ranks = random_specs(draw, draw.randint(1, 12)), draw.randint(1, 8)
        options = {"alignment": draw.choice([1, 4]), "align_starts": draw.random() < 0.5}
        layout = plan_layout(specs, ranks, order="best", **options)
        verify(layout)
        others = [
            plan_layout(specs, ranks, order=order, **options).shard_size
            for order in ("given", "block", "shape")
        ]
        assert layout.shard_size <= min(others)
        assert layout.exact
        better += layout.shard_size < min(others)
    assert better > 100


def test_it_is_at_most_a_quarter_above_the_best_of_all_orders_here():
    draw = random.Random(1)
    equal = 0
    for _ in range(60):
        specs, ranks = random_specs(draw, 5), draw.randint(2, 5)
        least = min(
            plan_layout(specs, ranks, order=order).shard_size for order in permutations(range(5))
        )
        found = plan_layout(specs, ranks, order="best").shard_size
        assert least <= found <= 1.25 * least
        equal += found == least
    assert equal > 45


def test_owners_of_whole_tensors_are_balanced():
    draw = random.Random(2)
    specs = specs_of([(numel, numel) for numel in draw.choices(range(100, 1_000), k=200)])
    given, packed = (plan_layout(specs, 16, order=order) for order in ("given", "best"))
    assert given.padding_ratio > 0.03
    assert packed.padding_ratio < 0.005


def test_it_stops_where_no_order_does_better(monkeypatch):
    specs = specs_of([(31, 5), (4, 1)])
    monkeypatch.setattr(search, "by_block", pytest.fail)
    assert plan_layout(specs, 7, order="best") == plan_layout(specs, 7)


def test_of_equals_the_given_order_wins():
    draw = random.Random(4)
    tried = 0
    for _ in range(300):
        specs, ranks = random_specs(draw, 5), draw.randint(2, 6)
        given, found = (plan_layout(specs, ranks, order=order) for order in ("given", "best"))
        if found.shard_size == given.shard_size:
            assert found == given
            blocks = [BlockedTensor(spec.numel, spec.block) for spec in specs]
            tried += given.shard_size > least_in_any_order(blocks, ranks, 1)
    assert tried > 10


def test_the_search_is_bounded(monkeypatch):
    specs = random_specs(random.Random(3), 40)
    attempts = []
    monkeypatch.setattr(
        search._core, "arrange", lambda *arguments: attempts.append(arguments) or []
    )
    plan_layout(specs, 7, order="best")
    assert 0 < len(attempts) <= search.MOST_ATTEMPTS
    attempts.clear()
    monkeypatch.setattr(search, "MOST_LOOKS", 1)
    plan_layout(specs, 7, order="best")
    assert len(attempts) <= 1
