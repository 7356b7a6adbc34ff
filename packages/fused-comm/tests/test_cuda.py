"""On a GPU: buckets are reduced by NCCL, behind the stream that computes gradients."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import GradReducer, redistribute_many
from testkit import CommLog, mesh_of_one

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

R, P, S0 = Replicate(), Partial(), Shard(0)
SHAPES = [(512, 64), (5, 3), (7,)]


@pytest.fixture
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh


def values(seed):
    torch.manual_seed(seed)
    return [torch.randn(shape).cuda() for shape in SHAPES]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_gradients_are_the_sums_of_microbatches(mesh, zero_copy):
    params = [torch.nn.Parameter(distribute_tensor(one, mesh, [R])) for one in values(0)]
    reducer = GradReducer(params, bucket_mb=100 / 2**20, zero_copy=zero_copy)
    for step in range(3):
        for micro in range(2):
            torch.cuda._sleep(10_000_000)  # the gradients are late
            local = [
                (param.to_local(grad_placements=[P]) * value).sum()
                for param, value in zip(params, values(10 * step + micro), strict=True)
            ]
            with reducer.no_sync() if micro == 0 else contextlib.nullcontext():
                sum(local).backward()
        reducer.finish()
        expected = [a + b for a, b in zip(values(10 * step), values(10 * step + 1), strict=True)]
        for param, wanted in zip(params, expected, strict=True):
            assert param.grad.placements == (R,)
            assert torch.equal(param.grad.to_local(), wanted)
            param.grad = None
    assert len(reducer.report().buckets) > 1


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("target", [R, S0], ids=str)
def test_many_tensors_are_reduced_in_one_collective(mesh, target, async_op):
    partial = [DTensor.from_local(one, mesh, [P]) for one in values(0)]
    with CommLog() as log:
        found = redistribute_many(partial, [target], async_op=async_op)
        found = found.wait() if async_op else found
    assert sum(log.counts().values()) <= 1
    for one, wanted in zip(found, values(0), strict=True):
        assert one.placements == (target,)
        assert torch.equal(one.full_tensor(), wanted)
