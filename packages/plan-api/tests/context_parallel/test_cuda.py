"""On a GPU: CUDA's kernels, merged tile by tile, equal attention over all keys."""

import pytest
import torch
import torch.nn.functional as F

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, SequenceSharding
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from plan_api.context_parallel.kernels import (
    AttentionOutput,
    TileOptions,
    select_block_kernel,
    select_kernel,
)
from plan_api.context_parallel.online_softmax import OnlineSoftmax
from plan_api.context_parallel.tiles import block_tiles
from testkit import mesh_of_one

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# The efficient kernel pads its log-sum-exp to 32 queries; chunks of 20 are padded.
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
LENGTH = 80


@pytest.fixture(autouse=True)
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh


def inputs(dtype):
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 64, device="cuda", dtype=dtype) for heads in (8, 4, 4, 8)]


MASKS = {
    "causal": AttentionMask(causal=True),
    "window of documents": AttentionMask.of_lengths([50, 30]) & AttentionMask(window=9),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_add_up_to_attention(dtype, mask):
    """As each of two ranks computes it, in zig-zag order: causal, full and masked tiles."""
    query, key, value, upstream = inputs(dtype)
    whole = [one.double().requires_grad_() for one in (query, key, value)]
    expected = F.scaled_dot_product_attention(*whole, mask.dense(LENGTH).cuda(), enable_gqa=True)
    expected.backward(upstream.double())
    order = SequenceSharding("zigzag", 2).token_order(LENGTH)
    grouped, upstream = (one.unflatten(1, (key.shape[1], -1)) for one in (query, upstream))
    kernel = select_kernel(grouped, None)
    grad_key, grad_value = torch.zeros_like(key).float(), torch.zeros_like(value).float()
    for rank, own in enumerate(order.positions(query.device).chunk(2)):
        queries = grouped[:, :, :, own]
        rows = kernel.join(queries.flatten(1, 2))
        merged = OnlineSoftmax(queries, value.shape[-1])
        block = block_tiles(mask, order.parts[rank], ((0, LENGTH),), LENGTH, LENGTH)
        options = [
            TileOptions(
                tile.kind == "causal",
                block.mask(tile, query.device) if tile.kind == "masked" else None,
            )
            for tile in block.tiles
        ]
        for number, tile in enumerate(block.tiles):
            part = kernel.forward(rows, key, value, tile, options[number])
            merged.add(tile, part.out, part.lse)
        out, lse = merged.result()
        close(out.flatten(1, 2), expected[:, :, own], dtype)
        grad_query = torch.zeros_like(queries).float()
        for number, tile in enumerate(block.tiles):
            grad, *output = (
                kernel.join(one.flatten(1, 2)) for one in (upstream[:, :, :, own], out, lse)
            )
            output = AttentionOutput(*output)
            found = kernel.backward(grad, rows, key, value, output, tile, options[number])
            grad_query[:, :, :, tile.queries] += found.query
            grad_key[:, :, tile.keys] += found.key
            grad_value[:, :, tile.keys] += found.value
        close(grad_query.flatten(1, 2), whole[0].grad[:, :, own], dtype)
    close(grad_key, whole[1].grad, dtype)
    close(grad_value, whole[2].grad, dtype)


@pytest.mark.parametrize("method", IMPLEMENTATIONS)
def test_one_rank_with_nccl(method, mesh):
    *tensors, upstream = inputs(torch.bfloat16)
    actual = [one.clone().requires_grad_() for one in tensors]
    reference = [one.clone().double().requires_grad_() for one in tensors]
    order = SequenceSharding("contiguous", 1).token_order(LENGTH)
    call = AttentionCall(mesh, 0, order, AttentionMask(causal=True), None, "attention")
    out = IMPLEMENTATIONS[method](*actual, call)
    expected = F.scaled_dot_product_attention(*reference, is_causal=True, enable_gqa=True)
    out.backward(upstream)
    expected.backward(upstream.double())
    close(out, expected, torch.bfloat16)
    for one, other in zip(actual, reference, strict=True):
        close(one.grad, other.grad, torch.bfloat16)


def close(actual, expected, dtype):
    tolerance = DTYPES[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_by_compiled_flex_attention(dtype, mesh):
    """Documents with a window, whose block is not divided into tiles."""
    length = 3 * 128 + 20
    mask = AttentionMask.of_lengths([200, 100, length - 300]) & AttentionMask(window=70)
    torch.manual_seed(0)
    *tensors, upstream = (
        torch.randn(2, heads, length, 64, device="cuda", dtype=dtype) for heads in (8, 4, 4, 8)
    )
    assert select_block_kernel(tensors[0].unflatten(1, (4, 2)), None) is not None
    actual = [one.clone().requires_grad_() for one in tensors]
    whole = [one.double().requires_grad_() for one in tensors]
    order = SequenceSharding("contiguous", 1).token_order(length)
    out = IMPLEMENTATIONS["ring"](*actual, AttentionCall(mesh, 0, order, mask, None, "attention"))
    expected = F.scaled_dot_product_attention(*whole, mask.dense(length).cuda(), enable_gqa=True)
    out.backward(upstream)
    expected.backward(upstream.double())
    close(out, expected, dtype)
    for one, other in zip(actual, whole, strict=True):
        close(one.grad, other.grad, dtype)
