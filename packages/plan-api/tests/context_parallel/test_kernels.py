"""Tiles that are merged: also of queries that attend to nothing in a tile, or at all."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, SequenceSharding
from plan_api.context_parallel.kernels import TileOptions, select_kernel
from plan_api.context_parallel.methods import ring_attention
from plan_api.context_parallel.online_softmax import OnlineSoftmax
from plan_api.context_parallel.tiles import AttentionTile


def test_queries_that_attend_to_nothing_in_a_tile_take_the_others():
    """The first tile has no key of queries 1 and 2, and no tile has one of query 2."""
    query, key, value = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
    grouped = query.unflatten(1, (2, 1))
    kernel, merged = select_kernel(grouped, None), OnlineSoftmax(grouped, 8)
    for keys in (slice(0, 2), slice(2, 4)):
        tile = AttentionTile(slice(None), slice(0, 4), keys, "masked")
        part = kernel.forward(query, key, value, tile, TileOptions(mask=mask[:, keys]))
        merged.add(tile, part.out, part.lse)
    out, lse = (one.flatten(1, 2) for one in merged.result())
    assert_close(out, F.scaled_dot_product_attention(query, key, value, mask))
    scores = (query @ key.mT * 8**-0.5).masked_fill(~mask, -torch.inf).logsumexp(-1)
    assert_close(lse, scores.masked_fill(scores == -torch.inf, 0.0))


@pytest.mark.parametrize(
    ("lengths", "window", "batch"),
    [
        ((1030, 5, 128, 130), None, 1), ((40, 7, 7, 40, 40, 40), None, 1),
        ((140, 140, 9, 140), None, 2), ((330, 90, 30), 75, 2), ((120,), 2, 1),
    ],
    ids=str,
)  # fmt: skip
def test_documents_and_windows_of_any_length_equal_one_device_in_float64(lengths, window, batch):
    """Causal tiles that are halved, divided into strips, joined if they are equal, or none.

    Strips of a window are joined, of which each needs keys of the one before.
    """
    mask, length = AttentionMask.of_lengths(lengths), sum(lengths)
    if window is not None:
        mask = mask & AttentionMask(window=window)
    inputs = [torch.randn(batch, heads, length, 8, dtype=torch.float64) for heads in (6, 2, 2, 6)]
    order = SequenceSharding("contiguous", 1).token_order(length)
    call = AttentionCall(None, None, order, mask, None, "attention")
    # As projections make them: (batch, queries, heads, features), of which heads are moved.
    *actual, upstream = (
        one.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in inputs
    )
    *expected, _ = (one.clone().requires_grad_() for one in inputs)
    out = ring_attention(*actual, call)
    reference = F.scaled_dot_product_attention(*expected, mask.dense(length), enable_gqa=True)
    out.backward(upstream.detach())
    reference.backward(upstream.detach())
    compared = [
        (out, reference),
        *((a.grad, b.grad) for a, b in zip(actual, expected, strict=True)),
    ]
    for one, other in compared:
        assert_close(one, other, rtol=0, atol=1e-12)
