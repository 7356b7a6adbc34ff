"""Elementwise operators on ragged tensors, one by one and in lists."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard
from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
ROWS, ELEMENTS = (0,), (0, 1)


PLACEMENTS = [
    RaggedShard(ROWS, (5, 7)),
    RaggedShard(ROWS, (0, 3)),
    RaggedShard(ELEMENTS, (7, 89)),
    RaggedShard(ELEMENTS, (1, 0)),
    RaggedShard.owned_by(1, 2),
]


def operand(dtype=torch.float32):
    return ((torch.arange(96).reshape(12, 8) * 37) % 17 - 8).to(dtype)


def full(result):
    return result.full_tensor() if isinstance(result, DTensor) else result


def is_ragged(result, placement):
    return result.placements == (placement,)


def _replica(tensor, mesh):
    return DTensor.from_local(tensor, mesh, [R], run_check=False)


# Elementwise: no communication, and the result placed as the operand.
ELEMENTWISE = {
    "neg": torch.neg,
    "exp": torch.exp,
    "mul scalar": lambda x: x * 3,
    "add itself": lambda x: x + x,
    "rsub": lambda x: 1 - x,
    "clamp": lambda x: x.clamp(-2, 5),
    "where": lambda x: torch.where(x > 0, x, -x),
    "gelu": nn.functional.gelu,
    "to bf16": lambda x: x.to(torch.bfloat16),
    "comparison": lambda x: x > 1,
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 3.0),
    "empty_like filled": lambda x: torch.empty_like(x).fill_(2),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "copy_": lambda x: torch.zeros_like(x).copy_(x),
    "add_": lambda x: x.clone().add_(x, alpha=2),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv_": lambda x: x.clone().addcdiv_(x, x.abs() + 1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.25),
    "zero_": lambda x: x.clone().zero_(),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "pow": lambda x: x**2,
    "isfinite": torch.isfinite,
    "foreach_add": lambda x: torch._foreach_add([x, x], 2.0)[1],
    "foreach_mul": lambda x: torch._foreach_mul([x, x * 2], [x, x])[1],
    "foreach_addcdiv_": lambda x: _inplace(torch._foreach_addcdiv_, x),
    "foreach_lerp_": lambda x: _lerp(x),
    "foreach_sqrt": lambda x: torch._foreach_sqrt([x.abs()])[0],
    "foreach_copy_": lambda x: _copied(x),
}


def _inplace(function, x):
    result = [x.clone()]
    function(result, [x], [x.abs() + 1], 0.5)
    return result[0]


def _lerp(x):
    result = [x.clone(), x.clone()]
    torch._foreach_lerp_(result, [x * 2, x * 3], 0.25)
    return result[1]


def _copied(x):
    result = [torch.zeros_like(x)]
    torch._foreach_copy_(result, [x])
    return result[0]


def elementwise(name):
    function = ELEMENTWISE[name]
    mesh = init_device_mesh("cpu", (2,))
    expected = function(operand())
    for placement in PLACEMENTS:
        ragged = distribute_tensor(operand(), mesh, [placement])
        with CommLog() as log, ragged_shard.strict():
            result = function(ragged)
        log.assert_counts({})
        assert is_ragged(result, placement), (result.placements, placement)
        assert result.to_local().shape == ragged.to_local().shape
        assert_bitwise(result.full_tensor(), expected, f"{name} {placement}")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_stay_where_they_are(name):
    run_ranks(elementwise, 2, name)


def mixed_operands():
    mesh = init_device_mesh("cpu", (2,))
    ragged = distribute_tensor(operand(), mesh, [RaggedShard(ROWS, (5, 7))])
    column, row = operand()[:, :1].contiguous(), operand()[0].contiguous()
    cases = {
        "replica": (_replica(operand(), mesh), {}),
        "shard": (distribute_tensor(operand(), mesh, [Shard(1)]), {"all_to_all": 1}),
        "other units": (
            distribute_tensor(operand(), mesh, [RaggedShard(ELEMENTS, (1, 1))]),
            {"all_to_all": 1},
        ),
        "sum": (DTensor.from_local(operand() / 2, mesh, [Partial()]), {"all_to_all": 1}),
        "row": (_replica(row, mesh), {}),
        "row of a matrix": (_replica(row.view(1, 8), mesh), {}),
        "column": (_replica(column, mesh), {}),
        "ragged column": (distribute_tensor(column, mesh, [RaggedShard(ROWS, (5, 7))]), {}),
        "scalar": (_replica(torch.tensor(3.0), mesh), {}),
        "plain scalar": (torch.tensor(3.0), {}),
    }
    for name, (other, counts) in cases.items():
        with CommLog() as log, ragged_shard.strict():
            result = ragged + other
        log.assert_counts(counts)
        assert is_ragged(result, ragged.placements[0]), name
        assert_bitwise(result.full_tensor(), operand() + full(other), name)
    elements = distribute_tensor(operand(), mesh, [RaggedShard(ELEMENTS, (5, 7))])
    ragged_shard.reset_fallbacks()
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning):
        result = elements + _replica(row, mesh)  # pieces that end within a row
    assert_bitwise(result.full_tensor(), operand() + row, "a row beside elements")

    replica = _replica(operand(), mesh)
    with ragged_shard.strict():
        replica.add_(ragged)
    assert replica.placements == (R,)
    assert_bitwise(replica.full_tensor(), operand() * 2, "in place on a replica")


def test_other_operands_are_brought_to_the_ragged_one():
    run_ranks(mixed_operands, 2)


def equal():
    mesh = init_device_mesh("cpu", (2,))
    a = distribute_tensor(operand(), mesh, [RaggedShard(ROWS, (5, 7))])
    b = distribute_tensor(operand(), mesh, [RaggedShard(ELEMENTS, (1, 1))])
    assert torch.equal(a, b)
    b.to_local()[-1:] += 1 if dist.get_rank() == 1 else 0
    assert not torch.equal(a, b)


def test_equal_is_the_same_answer_on_every_rank():
    run_ranks(equal, 2)
