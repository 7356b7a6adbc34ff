"""Chunks of sequences: every product of causal attention is some rank's, and zig-zag is even."""

import pytest
import torch

from plan_api.context_parallel import Order
from plan_api.context_parallel.order import ORDERS, piece_between, pieces_over_all

LENGTH = 24
RANKS = (1, 2, 3, 4)


def seen(order, rank, causal):
    """The products that a rank computes, by pieces of blocks and over all: (query, key) counts."""
    positions = order.positions(LENGTH).view(order.ranks, -1)
    own, each = positions[rank], LENGTH // order.ranks
    by_block, over_all = torch.zeros(2, LENGTH, LENGTH, dtype=torch.int)
    for source in range(order.ranks):
        piece = piece_between(order, rank, source, each, each, causal)
        if piece is not None:
            add(by_block, piece, own, positions[source])
    for piece in pieces_over_all(order, rank, each, LENGTH, causal):
        add(over_all, piece, own, torch.arange(LENGTH))
    return by_block, over_all


def add(counts, piece, own, keys):
    queries, keys = own[piece.queries], keys[piece.keys]
    computed = torch.ones(len(queries), len(keys), dtype=torch.int)
    computed = computed.tril() if piece.causal else computed
    assert piece.products == computed.sum()
    counts[queries[:, None], keys[None, :]] += computed


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_each_product_is_computed_once_and_no_other(ranks, name, causal):
    order, ones = Order(name, ranks), torch.ones(LENGTH, LENGTH, dtype=torch.int)
    by_rank = [seen(order, rank, causal) for rank in range(ranks)]
    for counts in zip(*by_rank, strict=True):
        assert torch.equal(sum(counts), ones.tril() if causal else ones)


def work(name, ranks):
    """The products that each rank computes, of causal attention."""
    order, each = Order(name, ranks), LENGTH
    return [
        sum(piece.products for piece in pieces_over_all(order, rank, each, each * ranks, True))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_gives_all_ranks_the_same_work(ranks):
    assert len(set(work("zigzag", ranks))) == 1


def test_contiguous_gives_the_last_rank_most():
    """Of 4 ranks 7/16 and a bit, for the diagonal."""
    by_rank = work("contiguous", 4)
    assert by_rank == sorted(by_rank)
    assert by_rank[-1] / sum(by_rank) == pytest.approx(7 / 16, abs=0.01)


def test_zigzag_gives_an_early_chunk_and_a_late_one():
    assert Order("zigzag", 2).positions(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert Order("contiguous", 2).positions(8).tolist() == list(range(8))


@pytest.mark.parametrize(("name", "chunks", "length"), [("zigzag", 4, 6), ("contiguous", 2, 5)])
def test_a_length_that_cannot_be_cut_is_refused(name, chunks, length):
    order = Order(name, 2)
    order.check(4 * chunks, "x")
    with pytest.raises(ValueError, match=rf"x: a sequence of {length} cannot be cut into {chunks}"):
        order.check(length, "x")
