"""Attention of DTensors: the kernel of one device, on each rank's part."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from plan_api.patches import install_patches, uninstall_patches
from testkit import assert_bitwise

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


def assert_as_alone(mesh, given, mask=None, local_mask=None, **options):
    """Results and gradients are those of a rank's part by itself."""
    placements = given[0].placements
    alone = [x.to_local().detach().clone().requires_grad_() for x in given]
    result = F.scaled_dot_product_attention(*given, attn_mask=mask, **options)
    expected = F.scaled_dot_product_attention(*alone, attn_mask=local_mask, **options)
    assert result.placements == placements
    assert_bitwise(result.to_local(), expected)
    upstream = torch.randn_like(expected)
    result.backward(DTensor.from_local(upstream, mesh, placements, run_check=False))
    expected.backward(upstream)
    for one, other in zip(given, alone, strict=True):
        assert one.grad.placements == placements
        assert_bitwise(one.grad.to_local(), other.grad)


@pytest.mark.parametrize("dp", PLACEMENTS, ids=str)
@pytest.mark.parametrize("tp", PLACEMENTS, ids=str)
def test_batch_and_heads_may_be_sharded(mesh, dp, tp):
    assert_as_alone(mesh, inputs(mesh, [dp, tp]), is_causal=True)


@pytest.mark.parametrize("dp", PLACEMENTS, ids=str)
@pytest.mark.parametrize("tp", PLACEMENTS, ids=str)
def test_the_math_backend_computes_causal_attention_of_groups(mesh, dp, tp):
    """On a GPU it is what computes grouped keys and values in float32."""
    query, key, value = inputs(mesh, [dp, tp])
    if (dp, tp) != (Shard(1), Shard(1)):  # 4 ranks have heads, and there are 2 groups
        key, value = (
            distribute_tensor(
                x.full_tensor().detach()[:, :2].contiguous(), mesh, [dp, tp], src_data_rank=None
            ).requires_grad_()
            for x in (key, value)
        )
    with sdpa_kernel(SDPBackend.MATH):
        assert_as_alone(mesh, (query, key, value), is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    "shape", [(6, 6), (1, 1, 6, 6), (4, 1, 6, 6), (1, 4, 6, 6), (*SHAPE[:3], 6)]
)
@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Replicate(), Shard(0)]], ids=str)
def test_a_mask_is_sharded_as_the_query(mesh, shape, placements):
    torch.manual_seed(1)
    whole = torch.randn(shape)
    mask = distribute_tensor(whole, mesh, [Replicate()] * 2, src_data_rank=None)
    local = whole.expand(4, 4, 6, 6)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(2, placement.dim)[mesh.get_local_rank(axis)]
    assert_as_alone(mesh, inputs(mesh, placements), mask, local.contiguous())


def test_results_have_the_strides_of_one_device(mesh):
    """A view of them is possible where it is on one device; models transpose heads and sequence."""
    torch.manual_seed(0)
    whole = [torch.randn(4, 6, 4, 8) for _ in range(3)]
    given = [
        distribute_tensor(x, mesh, [Shard(0), Shard(2)], src_data_rank=None).transpose(1, 2)
        for x in whole
    ]
    mask = distribute_tensor(torch.zeros(6, 6), mesh, [Replicate()] * 2, src_data_rank=None)
    result = F.scaled_dot_product_attention(*given, attn_mask=mask)
    one = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in whole), attn_mask=torch.zeros(6, 6)
    )
    assert not one.is_contiguous()
    assert result.stride() == one.stride()


def test_a_mask_of_other_placements_is_an_error_with_a_remedy(mesh):
    mask = distribute_tensor(torch.zeros(6, 6), mesh, [Replicate()] * 2, src_data_rank=None)
    query, key, value = inputs(mesh, [Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match=r"expected query.*attn_implementation='eager'"):
        F.scaled_dot_product_attention(
            query.redistribute(placements=[Shard(0), Replicate()]), key, value, attn_mask=mask
        )


def test_groups_that_the_ranks_do_not_divide_are_not_computed_apart(mesh):
    """Of 4 ranks two would have a head without its keys and values: torch refuses it."""
    torch.manual_seed(0)
    query, key, value = (
        distribute_tensor(torch.randn(4, heads, 6, 8), mesh, [Shard(1)] * 2, src_data_rank=None)
        for heads in (4, 2, 2)
    )
    with (
        sdpa_kernel(SDPBackend.MATH),
        pytest.raises(RuntimeError, match=r"is invalid for input|got mixed torch|being sharded"),
    ):
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_it_is_restored_when_nobody_has_replaced_it_since(monkeypatch):
    native = torch._C._nn.scaled_dot_product_attention
    uninstall_patches()
    assert F.scaled_dot_product_attention is native
    monkeypatch.setattr(F, "scaled_dot_product_attention", native)  # again, whatever happens
    install_patches(())
    replaced = F.scaled_dot_product_attention
    assert replaced is not native
    F.scaled_dot_product_attention = later = lambda *args, **kwargs: replaced(*args, **kwargs)
    uninstall_patches()
    assert F.scaled_dot_product_attention is later
