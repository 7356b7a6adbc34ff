"""Reductions of ragged tensors, their gradients, and clipping by a norm."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import CommLog, assert_close, run_ranks

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


# Reductions: a Partial, or a ragged result where whole dims are reduced. kept: over rows only.
REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "amax": torch.amax,
    "amin": torch.amin,
    "prod": lambda x: torch.prod(x.sign() + 0.5),
    **{
        f"norm {order}": lambda x, order=order: torch.linalg.vector_norm(x, order)
        for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf, -1)
    },
    "norm method": lambda x: x.norm(),
    "foreach_norm": lambda x: torch._foreach_norm([x, x * 2])[1],
    "foreach_norm inf": lambda x: torch._foreach_norm([x, x * 2], math.inf)[1],
    "sum of all dims": lambda x: x.sum((0, 1)),
    "dot": lambda x: torch.dot(x.view(-1), x.view(-1)),
}


def reductions(name):
    function = REDUCTIONS[name]
    mesh = init_device_mesh("cpu", (2,))
    expected = function(operand())
    for placement in PLACEMENTS:
        ragged = distribute_tensor(operand(), mesh, [placement])
        with CommLog() as log, ragged_shard.strict():
            result = function(ragged)
        log.assert_counts({})
        assert result.placements[0].is_partial(), result.placements
        assert_close(result.full_tensor(), expected, rtol=1e-5, atol=1e-5, what=f"{placement}")


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_leave_a_partial_on_every_shard_empty_ones_too(name):
    run_ranks(reductions, 2, name)


def reductions_where_bases_differ(name):
    """The ranks of an axis have 4 and 3 rows, or 1 and none; a mean is of rows, and gathered."""
    function, gathers = REDUCTIONS[name], name == "mean"
    mesh = init_device_mesh("cpu", (2, 2))
    for rows, ragged in (
        (7, (ROWS, (3, 1), 2, 1)), (7, (ROWS, (0, 1), 2, 4)), (7, (ELEMENTS, (3, 29), 2, 1)),
        (1, (ROWS, (1, 0), 2, 1)), (1, (ELEMENTS, (1, 3), 2, 2)),
    ):  # fmt: skip
        placements = [StridedRaggedShard(*ragged), Shard(0)]
        tensor, expected = operand()[:rows], function(operand()[:rows])
        placed = distribute_tensor(tensor, mesh, placements)
        with nullcontext() if gathers else ragged_shard.strict(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=ragged_shard.RaggedShardFallbackWarning)
            result = function(placed)
        assert_close(full(result), expected, rtol=1e-5, atol=1e-5, what=f"{rows} {placements}")


# torch does not flatten a dim that is sharded unevenly, as the dot product has to.
@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name != "dot"])
def test_reductions_where_another_axis_shards_unevenly(name):
    run_ranks(reductions_where_bases_differ, 4, name)


ALONG_A_DIM = {
    "sum of rows": (lambda x: x.sum(1), ROWS),
    "sum of rows kept": (lambda x: x.sum(1, keepdim=True), ROWS),
    "sum of columns": (lambda x: x.sum(0), None),
    "mean of rows": (lambda x: x.mean(-1), ROWS),
    "mean of columns": (lambda x: x.mean(0), None),
    "amax of rows": (lambda x: x.amax(1), ROWS),
    "amax of columns": (lambda x: x.amax(0), None),
    "amin of columns kept": (lambda x: x.amin(0, keepdim=True), None),
    "norm of rows": (lambda x: torch.linalg.vector_norm(x, 2, dim=1), ROWS),
    "norm of columns": (lambda x: torch.linalg.vector_norm(x, math.inf, dim=0), None),
    "max with indices": (lambda x: x.max(1).values, ROWS),
    "indices": (lambda x: x.max(1).indices, ROWS),
    "softmax": (lambda x: x.softmax(1), ROWS),
    "cumsum": (lambda x: x.cumsum(1), ROWS),
}


def along_a_dim(name):
    function, dims = ALONG_A_DIM[name]
    mesh = init_device_mesh("cpu", (2,))
    expected = function(operand())
    for placement in (PLACEMENTS[0], PLACEMENTS[1]):
        ragged = distribute_tensor(operand(), mesh, [placement])
        with CommLog() as log, ragged_shard.strict():
            result = function(ragged)
        log.assert_counts({})
        if dims is None:
            assert result.placements[0].is_partial()
        else:
            assert is_ragged(result, placement)
        assert_close(result.full_tensor(), expected, rtol=1e-6, atol=1e-6, what=name)


@pytest.mark.parametrize("name", ALONG_A_DIM)
def test_reductions_along_a_dim_of_whole_rows(name):
    run_ranks(along_a_dim, 2, name)


def three_dims():
    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(0))
    placement = RaggedShard((0, 1), (1, 2))
    ragged = distribute_tensor(tensor, mesh, [placement])
    cases = {
        "last": (lambda x: x.sum(2), (placement,)),
        "last kept": (lambda x: x.sum(2, keepdim=True), (placement,)),
        "leading": (lambda x: x.sum((0, 1)), (Partial(),)),
        "all": (lambda x: x.mean((0, 1, 2)), (Partial(),)),
        "last by number": (lambda x: x.prod(2), (placement,)),
    }
    for name, (function, placements) in cases.items():
        with ragged_shard.strict():
            result = function(ragged)
        assert result.placements == placements, name
        assert_close(result.full_tensor(), function(tensor), rtol=1e-6, atol=1e-6, what=name)
    owned = distribute_tensor(torch.tensor(3.0), mesh, [RaggedShard.owned_by(1, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ragged_shard.RaggedShardFallbackWarning)
        assert owned.softmax(0).full_tensor() == 1.0
    ragged_shard.reset_fallbacks()
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="sum"):
        result = ragged.sum(1)
    assert_close(result.full_tensor(), tensor.sum(1), rtol=1e-6, atol=1e-6, what="within")


def test_reductions_where_several_dims_are_cut_together():
    run_ranks(three_dims, 2)


def gradients_of_reductions():
    mesh = init_device_mesh("cpu", (2,))
    functions = {
        "sum": lambda x: x.sum(),
        "rows": lambda x: (x.sum(1) ** 2).sum(),
        "rows kept": lambda x: (x.sum(1, keepdim=True) * x).sum(),
        "mean of rows": lambda x: (x.mean(1) ** 2).sum(),
        "norm": lambda x: torch.linalg.vector_norm(x),
        "product": lambda x: (x @ x.new_ones(8, 2)).sum(),
    }
    for name, function in functions.items():
        plain = operand().requires_grad_()
        function(plain).backward()
        ragged = distribute_tensor(operand(), mesh, [PLACEMENTS[0]]).requires_grad_()
        with ragged_shard.strict(enabled=name != "product"), warnings.catch_warnings():
            warnings.simplefilter("ignore", ragged_shard.RaggedShardFallbackWarning)
            full(function(ragged)).backward()
        assert_close(ragged.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-5, what=name)


def test_gradients_of_reductions():
    run_ranks(gradients_of_reductions, 2)


def clipping():
    mesh = init_device_mesh("cpu", (2,))
    units = [(5, 7), (0, 3), (1, 1)]
    plain = [nn.Parameter(operand() + i) for i in range(3)]
    ragged = [
        nn.Parameter(distribute_tensor(p.detach(), mesh, [RaggedShard(ROWS, u)]))
        for p, u in zip(plain, units, strict=True)
    ]
    for norm_type in (2.0, 1.0, math.inf):
        for a, b in zip(plain, ragged, strict=True):
            a.grad = a.detach() * 2
            b.grad = b.detach() * 2
        expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
        with ragged_shard.strict():
            total = nn.utils.clip_grad_norm_(ragged, 1.0, norm_type)
        assert_close(full(total), expected, rtol=1e-6, atol=0, what=f"norm {norm_type}")
        for a, b in zip(plain, ragged, strict=True):
            assert_close(b.grad.full_tensor(), a.grad, rtol=1e-6, atol=0, what="clipped")


def test_clip_grad_norm():
    run_ranks(clipping, 2)
