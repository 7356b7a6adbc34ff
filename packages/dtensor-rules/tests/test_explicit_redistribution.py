"""Within torch's ExplicitRedistributionContext: what it refuses, warns of and allows is torch's."""

import contextlib
import logging
import re
import threading

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext as Explicit

import dtensor_rules
from testkit import fake_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LOGGER = "torch.distributed.tensor._utils"
REASON = "explicit redistribution only"

# What moves nothing; what is cut where it is; what has to be sent, by general and typed kernels,
# those of no_grad among them.
PAIRS = {
    "none": (S0, S0), "local": (S0, R), "sent": (S0, S1), "list": (S0, S1), "typed": (S0, S1),
    "no_grad": (S0, S1),
}  # fmt: skip
NAMES = {"list": "aten.cat.default", "typed": "aten.mul.Tensor", "no_grad": "aten.mul.Tensor"}
CONTEXTS = {
    "none": contextlib.nullcontext,
    "raises": Explicit,
    "raises if strict": lambda: Explicit(strict=True),
    "warns": lambda: Explicit(mode="warn"),
    "warns if strict": lambda: Explicit(mode="warn", strict=True),
    "allows": lambda: Explicit(enable=False),
}


@pytest.fixture
def mesh():
    with fake_mesh((2,)) as mesh:
        yield mesh


def added(mesh, pair):
    left, right = (distribute_tensor(torch.ones(4, 4), mesh, [p]) for p in PAIRS[pair])
    if pair == "list":
        return torch.cat([left, right])
    if pair == "typed":
        return left * right
    if pair == "no_grad":
        with torch.no_grad():
            return left * right
    return torch.maximum(left, right)


def outcome(mesh, pair, caplog):
    """The result's spec or the error, and torch's warnings."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        try:
            found = added(mesh, pair)._spec
        except RuntimeError as error:
            found = without_arguments(str(error))
    warned = [str(record.msg) for record in caplog.records if record.name == LOGGER]
    return found, [without_arguments(message) for message in warned]


def without_arguments(message):
    """Torch names them where its own cache did not know the call."""
    return re.sub(r"(default|Tensor)\(.*\)", r"\1", message)


@pytest.mark.parametrize("inner", CONTEXTS)
@pytest.mark.parametrize("outer", ["none", "raises", "allows"])
@pytest.mark.parametrize("pair", PAIRS)
def test_as_with_torch_alone(mesh, pair, outer, inner, caplog):
    def contexts():
        stack = contextlib.ExitStack()
        stack.enter_context(CONTEXTS[outer]())
        stack.enter_context(CONTEXTS[inner]())
        return stack

    with contexts():
        expected = outcome(mesh, pair, caplog)
    with dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        with contexts():  # the plan is made within
            assert outcome(mesh, pair, caplog) == expected
            assert outcome(mesh, pair, caplog) == expected
        dtensor_rules.cache_clear()
        free = outcome(mesh, pair, caplog)
        with contexts():  # and without
            assert outcome(mesh, pair, caplog) == expected
        assert outcome(mesh, pair, caplog) == free
        assert free[1] == []
        stats = dtensor_rules.stats()[NAMES.get(pair, "aten.maximum.default")]
    watched = pair != "none" and (inner != "none" or outer != "none")
    assert stats.fallthrough.get(REASON, 0) == (3 if watched else 0)


def test_the_table_above_has_every_answer(mesh, caplog):
    def found(pair, context):
        with dtensor_rules.enabled(), CONTEXTS[context]():
            result, warned = outcome(mesh, pair, caplog)
        return ("raised" if isinstance(result, str) else "ran", len(warned))

    assert found("sent", "raises") == ("raised", 0)
    assert found("local", "raises") == ("ran", 0)
    assert found("local", "raises if strict") == ("raised", 0)
    assert found("none", "raises if strict") == ("ran", 0)
    assert found("sent", "warns") == ("ran", 1)
    assert found("sent", "allows") == ("ran", 0)


def test_other_threads_are_free(mesh):
    with dtensor_rules.enabled():
        added(mesh, "sent")
        dtensor_rules.stats_clear()
        with Explicit():
            thread = threading.Thread(target=added, args=(mesh, "sent"))
            thread.start()
            thread.join()
        stats = dtensor_rules.stats()["aten.maximum.default"]
    assert (stats.cache, stats.fallthrough) == (1, {})
