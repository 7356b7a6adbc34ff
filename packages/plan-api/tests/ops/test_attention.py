"""The CPU's fused attention on DTensors: the kernel of one device, on each rank's part."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plan_api.patches import install_patches

SHAPE = (4, 4, 6, 8)  # batch, heads, sequence, features
PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


@pytest.fixture(autouse=True)
def registered():
    install_patches(())


def inputs(mesh, placements):
    torch.manual_seed(0)
    return [
        distribute_tensor(torch.randn(SHAPE), mesh, placements, src_data_rank=None).requires_grad_()
        for _ in range(3)
    ]


@pytest.mark.parametrize("dp", PLACEMENTS, ids=str)
@pytest.mark.parametrize("tp", PLACEMENTS, ids=str)
def test_batch_and_heads_may_be_sharded(mesh, dp, tp):
    actual = inputs(mesh, [dp, tp])
    alone = [x.to_local().detach().clone().requires_grad_() for x in actual]
    result = F.scaled_dot_product_attention(*actual, is_causal=True)
    expected = F.scaled_dot_product_attention(*alone, is_causal=True)
    assert result.placements == (dp, tp)
    assert torch.equal(result.to_local(), expected)
    upstream = torch.randn_like(expected)
    result.backward(DTensor.from_local(upstream, mesh, [dp, tp], run_check=False))
    expected.backward(upstream)
    for one, other in zip(actual, alone, strict=True):
        assert one.grad.placements == (dp, tp)
        assert torch.equal(one.grad.to_local(), other.grad)


def test_a_mask_is_an_error_with_a_remedy(mesh):
    mask = distribute_tensor(torch.zeros(6, 6), mesh, [Replicate()] * 2, src_data_rank=None)
    with pytest.raises(RuntimeError, match=r"expected no mask.*attn_implementation='eager'"):
        F.scaled_dot_product_attention(*inputs(mesh, [Shard(0), Shard(1)]), attn_mask=mask)
