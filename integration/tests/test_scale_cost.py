"""The cost model, against numbers that are computed by hand."""

import pytest

from integration.scale.cost import Machine, NetworkLink, collective_seconds, step_time, throughput
from integration.scale.curves import strong_scaling, weak_scaling
from integration.scale.strategies import WorldAxis
from integration.scale.traffic import AxisTraffic, CountedStep, StepWork

# A second is 1e12 FLOPs, 100 bytes within a node, and 10 of a rank's card between nodes.
MACHINE = Machine(
    peak=2e12,
    efficiency=0.5,
    node=8,
    inside=NetworkLink(100.0, 1.0),
    between=NetworkLink(10.0, 10.0),
)


@pytest.mark.parametrize(
    ("op", "axis", "seconds"),
    [
        # 7 steps within a node
        ("all_gather", WorldAxis("tp", 8, 1), 7 * 1 + 400 / 100),
        ("all_reduce", WorldAxis("tp", 8, 1), 2 * 7 * 1 + 400 / 100),
        # 4 ranks of a node, that are next to each other
        ("all_gather", WorldAxis("shard", 4, 1), 3 * 1 + 400 / 100),
        # 32 ranks on 4 nodes: 3 of 31 steps between nodes, by the cards of 8 ranks
        ("reduce_scatter", WorldAxis("shard", 32, 1), 3 * 10 + 28 * 1 + 400 / 80),
        # a rank in each of 16 nodes, by its own card
        ("all_gather", WorldAxis("shard", 16, 8), 15 * 10 + 400 / 10),
        ("all_reduce", WorldAxis("replicate", 4, 256), 2 * 3 * 10 + 400 / 10),
        # every second rank: 4 in a node
        ("all_gather", WorldAxis("shard", 8, 2), 1 * 10 + 6 * 1 + 400 / 40),
    ],
)  # fmt: skip
def test_a_collective_takes_the_latency_of_its_ring_and_its_bytes(op, axis, seconds):
    assert collective_seconds(AxisTraffic(op, axis, 1, 400), MACHINE) == pytest.approx(seconds)
    thrice = collective_seconds(AxisTraffic(op, axis, 3, 1200), MACHINE)
    assert thrice == pytest.approx(3 * seconds)


def test_network_cards_are_no_faster_than_the_links_to_them():
    fast = Machine(inside=NetworkLink(100.0, 0.0), between=NetworkLink(50.0, 0.0))
    assert (
        collective_seconds(AxisTraffic("all_gather", WorldAxis("shard", 16, 1), 1, 400), fast) == 4
    )


EMPTY = StepWork()


def counted(*, axis="shard", root=EMPTY, layer=EMPTY, times=3, tokens=100, ranks=8):
    return CountedStep(
        "model", "strategy", ranks, tokens, (WorldAxis(axis, 8, 1),), root, (layer,), (times,)
    )


GATHERS = AxisTraffic("all_gather", WorldAxis("shard", 8, 1), 1, 400)  # 11 s
SENDS = AxisTraffic("all_gather", WorldAxis("tp", 8, 1), 1, 400)  # likewise


def test_layers_hide_collectives_up_to_their_compute_time():
    time = step_time(counted(layer=StepWork(15 * 10**12, traffic=(GATHERS,))), MACHINE)
    assert (time.compute, time.tensor, time.data, time.hidden) == pytest.approx((45, 0, 0, 33))
    time = step_time(counted(layer=StepWork(5 * 10**12, traffic=(GATHERS,))), MACHINE)
    assert (time.compute, time.tensor, time.data, time.hidden) == pytest.approx((15, 0, 18, 15))
    assert time.total == pytest.approx(33)


def test_a_part_of_computing_can_hide_a_part():
    machine = Machine(2e12, 0.5, 8, MACHINE.inside, MACHINE.between, overlap=0.4)
    time = step_time(counted(layer=StepWork(5 * 10**12, traffic=(GATHERS,))), machine)
    assert (time.data, time.hidden) == pytest.approx((27, 6))


def test_the_root_hides_nothing():
    time = step_time(counted(root=StepWork(50 * 10**12, traffic=(GATHERS,))), MACHINE)
    assert (time.compute, time.data, time.hidden) == pytest.approx((50, 11, 0))


def test_tensor_parallelism_is_waited_for_and_grows_with_tokens():
    one = counted(axis="tp", layer=StepWork(5 * 10**12, traffic=(SENDS,)))
    assert step_time(one, MACHINE).tensor == pytest.approx(33)
    twice = step_time(one, MACHINE, tokens=200)
    assert (twice.compute, twice.tensor) == pytest.approx((30, 3 * (7 + 8)))


def test_data_parallel_traffic_does_not_grow_with_tokens():
    one = counted(layer=StepWork(5 * 10**12, traffic=(GATHERS,)))
    twice = step_time(one, MACHINE, tokens=200)
    assert twice.data + twice.hidden == pytest.approx(33)


def test_gradients_of_replicas_are_reduced_behind_all_layers():
    reduces = AxisTraffic("all_reduce", WorldAxis("replicate", 8, 1), 1, 400)
    time = step_time(
        counted(axis="replicate", layer=StepWork(15 * 10**12, traffic=(reduces,))), MACHINE
    )
    assert (time.data, time.hidden) == pytest.approx((3 * 18, 0))


def test_tokens_per_second_count_shared_data_once():
    layer = StepWork(5 * 10**12)
    alone, shared = counted(layer=layer), counted(axis="tp", layer=layer)
    assert throughput(alone, step_time(alone, MACHINE)) == pytest.approx(8 * 100 / 15)
    assert throughput(shared, step_time(shared, MACHINE)) == pytest.approx(100 / 15)


def test_weak_scaling_keeps_tokens_of_a_rank_and_strong_scaling_those_of_all():
    counts = [counted(layer=StepWork(5 * 10**12), ranks=ranks) for ranks in (16, 8)]
    (weak,) = weak_scaling(counts, MACHINE, 50)
    assert [(point.x, point.tokens) for point in weak.points] == [(8, 50), (16, 50)]
    assert [point.seconds for point in weak.points] == pytest.approx([7.5, 7.5])
    assert [point.mfu for point in weak.points] == pytest.approx([0.5, 0.5])
    (strong,) = strong_scaling(counts, MACHINE, 1600)
    assert [point.seconds for point in strong.points] == pytest.approx([30, 15])
    assert [point.throughput for point in strong.points] == pytest.approx([1600 / 30, 1600 / 15])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"efficiency": 0.0}, "efficiency: expected a share of at most 1, got 0.0"),
        ({"efficiency": 1.5}, "efficiency: expected a share of at most 1, got 1.5"),
        ({"overlap": -0.1}, "overlap: expected a share of at most 1, got -0.1"),
        ({"peak": 0.0}, "peak: expected a number above 0, got 0.0"),
        ({"inside": NetworkLink(0.0, 1.0)}, "inside.bandwidth: expected a number above 0, got 0.0"),
        ({"between": NetworkLink(1.0, -1.0)}, "between.latency: expected 0 or more, got -1.0"),
    ],
)
def test_wrong_constants_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Machine(**wrong)
