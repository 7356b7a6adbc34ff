"""Calls of attention over sharded sequences that are refused, before anything is sent."""

import pytest
import torch

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, SequenceSharding
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from testkit import fake_mesh


def order(length=8):
    return SequenceSharding("contiguous", 2).token_order(length)


CALLS = {
    "a mask of another length": (
        "ring",
        {"mask": AttentionMask.of_lengths([5, 4])},
        r"attn: .*documents of 8 tokens together.*got 9 in row 0; shorten them",
    ),
    "a mask of another batch": (
        "all-gather",
        {"mask": AttentionMask(documents=((0, 8), (0, 3, 8)))},
        r"attn: .*one row or of 1, .*got 2 rows",
    ),
    "a mask of other keys": (
        "ring",
        {"key_order": order(length=7), "mask": AttentionMask(causal=True)},
        r"attn: .*as many queries as keys .*got 8 queries and 7 keys",
    ),
    "another part": (
        "ring",
        {"order": order(length=10)},
        r"attn: expected 5 queries on this rank, the part of a sequence of 10, got 4",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_unsupported_calls_are_refused(name):
    method, changes, message = CALLS[name]
    options = {"order": order(), "mask": AttentionMask(), "key_order": None} | changes
    with fake_mesh((2,), ("cp",)) as mesh:
        call = AttentionCall(
            mesh, 0, options["order"], options["mask"], None, "attn", key_order=options["key_order"]
        )
        with pytest.raises(ValueError, match=message):
            IMPLEMENTATIONS[method](*torch.ones(3, 1, 2, 4, 8), call)
