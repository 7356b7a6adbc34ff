"""Decisions that take longer than the budget are counted, and warned of once per operator."""

import math
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import dtensor_rules
from dtensor_rules.planning import planner


@pytest.fixture(autouse=True)
def default_budget_after():
    yield
    dtensor_rules.set_planning_budget(2.0)
    dtensor_rules.stats_clear()


def slow(name):
    return dtensor_rules.stats()[name].slow


def test_the_first_decision_of_an_operator_is_warned_of_and_all_are_counted(x):
    dtensor_rules.set_planning_budget(0.0)
    with pytest.warns(
        RuntimeWarning, match=r"planning aten\.neg\.default\(Spec\(f32\[4, 4\]"
    ) as caught:
        torch.neg(x)
    (message,) = [str(one.message) for one in caught if "aten.neg" in str(one.message)]
    assert "expected at most 0 s (dtensor_rules.set_planning_budget)" in message
    assert "S(0)" in message
    assert "DeviceMesh((2,)" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.neg(x)  # from the cache
        torch.neg(DTensor.from_local(torch.ones(4, 4), x.device_mesh, [Replicate()]))
    assert slow("aten.neg.default") == 2


def test_decisions_within_the_budget_are_silent(x):
    dtensor_rules.set_planning_budget(math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.neg(x)
    assert slow("aten.neg.default") == 0


def test_only_processor_time_counts(x, monkeypatch):
    """Other work on the machine makes a decision take longer by the clock only."""
    times = iter([1.0, 4.5])
    monkeypatch.setattr(planner.time, "thread_time", lambda: next(times))
    with pytest.warns(RuntimeWarning, match=r"aten\.cos.* took 3\.5 s"):
        torch.cos(x)


def test_clearing_the_counts_clears_these_too(x):
    dtensor_rules.set_planning_budget(0.0)
    with pytest.warns(RuntimeWarning, match="aten.exp"):
        torch.exp(x)
    dtensor_rules.stats_clear()
    dtensor_rules.cache_clear()
    with pytest.warns(RuntimeWarning, match="aten.exp"):
        torch.exp(x)
    assert slow("aten.exp.default") == 1


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_budget_is_a_time(seconds):
    with pytest.raises(ValueError, match="expected seconds of at least 0, got"):
        dtensor_rules.set_planning_budget(seconds)
