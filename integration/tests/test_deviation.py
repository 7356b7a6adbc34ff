"""The distance between two curves, and what a run costs: pure numbers."""

import math

import pytest

from integration.compare.measurements import cost, deviation
from integration.train.metrics import RunSummary, StepRecord

NAN = math.nan


def test_equal_curves_are_bitwise_equal():
    found = deviation([3.0, 2.5], [3.0, 2.5])
    assert (found.maximum, found.mean, found.bitwise_equal) == (0.0, 0.0, True)


def test_the_smallest_possible_difference_is_not_bitwise_equal():
    found = deviation([math.nextafter(3.0, 4.0)], [3.0])
    assert not found.bitwise_equal
    assert found.within(1e-9)


def test_the_largest_difference_is_found_where_it_first_occurs_and_whatever_its_sign():
    found = deviation([3.0, 1.5, 2.0, 0.5], [3.0, 2.0, 2.25, 1.0])
    assert (found.maximum, found.step, found.mean) == (0.5, 2, 0.3125)
    assert found.differences == (0.0, 0.5, 0.25, 0.5)


def test_the_tolerance_itself_is_within():
    found = deviation([1.5], [1.0])
    assert found.within(0.5)
    assert not found.within(0.49)


@pytest.mark.parametrize(
    ("losses", "reference"),
    [
        ([1.0, NAN, 9.0], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 9.0], [1.0, NAN, 1.0]),
        ([1.0, NAN, 9.0], [1.0, NAN, 1.0]),
        ([1.0, math.inf, 9.0], [1.0, math.inf, 1.0]),
    ],
    ids=["in the curve", "in the reference", "in both", "infinite in both"],
)
def test_not_a_number_leaves_every_tolerance(losses, reference):
    found = deviation(losses, reference)
    assert math.isnan(found.maximum)
    assert math.isnan(found.mean)
    assert found.step == 2
    assert not found.within(math.inf)
    assert not found.bitwise_equal


def test_curves_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="got 1 and 2"):
        deviation([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        deviation([], [])


def records(*seconds):
    return [
        StepRecord(step=step, loss=1.0, seconds=each, tokens=100)
        for step, each in enumerate(seconds, start=1)
    ]


def summary(*peaks):
    return RunSummary(
        system="ddp",
        model="llama-tiny",
        parameters=1,
        world_size=len(peaks),
        data_parallel_degree=len(peaks),
        accumulation=1,
        micro_batch=4,
        steps=1,
        data_source="",
        peak_rss_bytes=list(peaks),
    )


def test_the_first_three_steps_are_warm_up():
    found = cost(records(9.0, 8.0, 7.0, 1.0, 2.0, 4.0), summary(10, 30))
    assert (found.step_seconds, found.quartiles) == (2.0, (1.5, 3.0))
    assert found.tokens_per_second == 50.0
    assert (found.peak_rss_mean, found.peak_rss_max) == (20.0, 30)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_short_run_is_measured_by_its_last_step(steps):
    found = cost(records(*[9.0] * (steps - 1), 2.0), summary(1))
    assert (found.step_seconds, found.quartiles) == (2.0, (2.0, 2.0))
