"""Operators without a rule."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard
from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
ROWS, ELEMENTS = (0,), (0, 1)


def operand(dtype=torch.float32):
    return ((torch.arange(96).reshape(12, 8) * 37) % 17 - 8).to(dtype)


def full(result):
    return result.full_tensor() if isinstance(result, DTensor) else result


def without_a_rule():
    mesh = init_device_mesh("cpu", (2,))
    ragged_shard.reset_fallbacks()
    ragged = distribute_tensor(operand(), mesh, [RaggedShard(ROWS, (5, 7))])
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="aten.t.default has no rule"):
        result = ragged.t()
    assert_bitwise(full(result), operand().t(), "t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ragged.t()  # once said is enough
    assert ragged_shard.fallbacks() == {"aten.t.default": 2}
    with (
        CommLog() as log,
        ragged_shard.strict(),
        pytest.raises(RuntimeError, match="forbids"),
    ):
        ragged.t()
    log.assert_counts({})
    for name, function in {"argmax": torch.argmax, "row": lambda x: x[3]}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ragged_shard.RaggedShardFallbackWarning)
            assert_bitwise(full(function(ragged)), function(operand()), name)
    assert ragged_shard.fallbacks()["aten.argmax.default"] == 1
    with pytest.raises(RuntimeError, match=r"dist_rng\.install"):
        ragged.random_(9)
    with pytest.raises(RuntimeError, match="no rule for this in-place operator"):
        ragged.cumsum_(0)


def test_an_operator_without_a_rule_gathers_warns_once_counts_and_can_be_refused():
    run_ranks(without_a_rule, 2)
