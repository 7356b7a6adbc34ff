"""Tiles that are merged: also of queries that attend to nothing in a tile, or at all."""

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from plan_api.context_parallel.kernels import TileOptions, select_kernel
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
        part = kernel.forward(grouped, key, value, tile, TileOptions(mask=mask[:, keys]))
        merged.add(tile, part.out, part.lse)
    out, lse = (one.flatten(1, 2) for one in merged.result())
    assert_close(out, F.scaled_dot_product_attention(query, key, value, mask))
    scores = (query @ key.mT * 8**-0.5).masked_fill(~mask, -torch.inf).logsumexp(-1)
    assert_close(lse, scores.masked_fill(scores == -torch.inf, 0.0))
