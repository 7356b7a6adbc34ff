"""The log of misses and of what falls through: what it says, when, and when nothing."""

import logging
import re

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_rules
from dtensor_rules.inspect import logs
from testkit import fake_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
TOOK = re.compile(r"\d+ us$")


@pytest.fixture
def lines(caplog):
    """A function: the lines of a logger since it was asked last."""
    caplog.set_level(logging.DEBUG, "dtensor_rules")

    def lines_since(logger=logs.MISSES):
        found = [record.getMessage() for record in caplog.records if record.name == logger.name]
        caplog.clear()
        return found

    return lines_since


def placed(mesh, placement, *shape):
    return distribute_tensor(torch.ones(shape or (4, 4)), mesh, [placement])


def test_a_miss_says_what_was_planned_and_a_hit_nothing(mesh, lines):
    x, y = placed(mesh, S0), placed(mesh, S1)
    torch.maximum(x, y)
    (line,) = lines()
    assert line.startswith(f"aten.maximum.default({x._spec}, {y._spec}) -> {x._spec}; ")
    assert f"argument 1 to {x._spec} by AllToAll; by torch's propagation, " in line
    assert TOOK.search(line)
    torch.maximum(x, y)
    assert lines() == []


def test_what_a_line_says_of_other_calls(mesh, lines):
    x = placed(mesh, S0)
    torch.cat([x, placed(mesh, S1)], dim=1)
    assert f"aten.cat.default([{x._spec}, " in (line := lines()[0])
    assert "argument 0[1]" in line or "argument 0[0]" in line
    x.mul_(2.0)
    assert "aten.mul_.Tensor(" in (line := lines()[0])
    assert "-> what is written; no redistribution; by the rule 'out-given'" in line
    torch.mul(x, x, out=torch.empty_like(x))
    assert f"-> {x._spec}; no redistribution; by the rule 'out-given'" in lines()[-1]
    torch.equal(x, x)
    assert "-> one number; " in lines()[-1]
    x.split(2, dim=1)
    assert "aten.split.Tensor" in (line := lines()[-1])
    assert " 2, 1) -> [Spec(" in line


def test_a_call_that_is_torchs_says_why(mesh, lines):
    x = placed(mesh, S0)
    torch.argmax(x)
    with pytest.raises(RuntimeError):
        torch.mm(x, placed(mesh, S0, 3, 3))
    found = [line for line in lines() if "is torch's" in line]
    assert [line.split("(")[0] for line in found] == ["aten.argmax.default", "aten.mm.default"]
    assert "is torch's: handler; " in found[0]
    assert "is torch's: propagation; " in found[1]


def test_what_falls_through_is_said_once_per_operator_and_reason(mesh, lines):
    x, plain = placed(mesh, R), torch.ones(4, 4)

    def call():
        for operator in (torch.add, torch.mul):
            with pytest.raises(RuntimeError):
                operator(x, plain)
        with torch.inference_mode():
            torch.neg(x)

    expected = [
        "aten.add.Tensor is left to torch: plain tensor",
        "aten.mul.Tensor is left to torch: plain tensor",
        "aten.neg.default is left to torch: mode",
    ]
    call()
    call()
    assert lines(logs.FALLTHROUGH) == expected
    dtensor_rules.stats_clear()
    call()
    assert lines(logs.FALLTHROUGH) == expected


def test_methods_are_said_too(mesh, lines):
    x = placed(mesh, S0)
    with torch.inference_mode():
        x.redistribute(placements=[R])
        x.to_local()
        x.to_local()
    found = lines(logs.FALLTHROUGH)
    assert found.count("DTensor.redistribute is left to torch: mode") == 1
    assert found.count("DTensor.to_local is left to torch: mode") == 1


def test_nobody_listens_by_default(mesh):
    assert not logs.wants_misses()
    assert not logs.MISSES.isEnabledFor(logging.INFO)


@pytest.fixture
def unconfigured():
    """The loggers as they were before."""
    loggers = (logs.MISSES, logs.FALLTHROUGH)
    before = [(one.level, list(one.handlers)) for one in loggers]
    dtensor_rules.disable()
    yield
    dtensor_rules.disable()
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


def test_the_environment_asks_for_it(monkeypatch, unconfigured, caplog):
    monkeypatch.setenv(logs.VARIABLE, " misses ,")
    dtensor_rules.enable()
    dtensor_rules.enable()
    assert logs.wants_misses()
    assert not logs.FALLTHROUGH.isEnabledFor(logging.DEBUG)
    assert logs.MISSES.handlers == []  # pytest has some on the root, as programs do


def test_it_goes_to_stderr_where_nobody_has_handlers(monkeypatch, unconfigured, capsys):
    monkeypatch.setenv(logs.VARIABLE, "misses,fallthrough")
    monkeypatch.setattr(logging.getLogger("dtensor_rules"), "propagate", False)
    for _ in range(2):
        with fake_mesh((2,)) as mesh, dtensor_rules.enabled():
            torch.neg(placed(mesh, S0))
    written = capsys.readouterr().err.splitlines()
    assert len(written) == 2
    assert "dtensor_rules.misses: aten.neg.default(" in written[0]


def test_a_name_that_is_no_log_is_refused(monkeypatch, unconfigured):
    monkeypatch.setenv(logs.VARIABLE, "mises")
    with pytest.raises(ValueError, match="'mises' is none of misses, fallthrough"):
        dtensor_rules.enable()
    assert not dtensor_rules.is_enabled()
