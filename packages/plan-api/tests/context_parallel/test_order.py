"""Orders of sequences: what each rank has, and that zig-zag order is balanced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plan_api import AttentionMask
from plan_api.context_parallel import SequenceSharding, TokenOrder
from plan_api.context_parallel.order import ORDERS, areas, balanced_order, within
from plan_api.context_parallel.tiles import block_tiles

RANKS = (1, 2, 3, 4)


def work(name, ranks):
    """Returns the number of products of each rank, in causal attention."""
    length = 192 * ranks
    parts = SequenceSharding(name, ranks).token_order(length).parts
    every, mask = ((0, length),), AttentionMask(causal=True)
    blocks = [block_tiles(mask, part, every, length, length) for part in parts]
    return [sum(tile.products for tile in block.tiles) for block in blocks]


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_gives_all_ranks_the_same_work(ranks):
    assert len(set(work("zigzag", ranks))) == 1


def test_contiguous_gives_the_last_rank_most():
    """On 4 ranks a little more than 7/16, as the diagonal counts."""
    by_rank = work("contiguous", 4)
    assert by_rank == sorted(by_rank)
    assert by_rank[-1] / sum(by_rank) == pytest.approx(7 / 16, abs=0.01)


def test_zigzag_pairs_an_early_chunk_with_a_late_one():
    zigzag = SequenceSharding("zigzag", 2).token_order(8)
    assert zigzag.positions().tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert SequenceSharding("balanced", 2).token_order(8) == zigzag
    contiguous = SequenceSharding("contiguous", 2).token_order(8)
    assert contiguous.positions().tolist() == list(range(8))


@pytest.mark.parametrize(("name", "chunks", "length"), [("zigzag", 4, 6), ("contiguous", 2, 5)])
def test_an_uneven_length_is_refused(name, chunks, length):
    order = SequenceSharding(name, 2)
    order.check_length(4 * chunks, "x")
    with pytest.raises(ValueError, match=rf"x: expected .* multiple of {chunks},.* got {length}"):
        order.check_length(length, "x")


@pytest.mark.parametrize("length", [1, 7, 24])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_each_position_is_on_one_rank_and_padding_behind_the_sequence(ranks, name, length):
    order = SequenceSharding(name, ranks).token_order(length)
    positions = order.positions()
    assert positions.sort().values.tolist() == list(range(order.padded_length))
    assert length <= order.padded_length < length + SequenceSharding(name, ranks).chunks
    for part in positions.chunk(ranks):
        assert part.tolist() == sorted(part.tolist())
    if name == "contiguous":
        assert order.is_contiguous
        assert torch.equal(positions, torch.arange(order.padded_length))


def test_parts_are_divided_in_their_order_and_grouped_again():
    order = SequenceSharding("zigzag", 2).token_order(12)
    divided = order.divided(3)
    assert divided.parts == (
        ((0, 2),), ((2, 3), (9, 10)), ((10, 12),), ((3, 5),), ((5, 7),), ((7, 9),),
    )  # fmt: skip
    assert divided.grouped(3) == order
    assert within(order.parts[0], slice(1, 4)) == ((1, 3), (9, 10))
    assert divided.ascending(3, 1) is None
    with pytest.raises(ValueError, match="whose length 4 ranks divide, got 6"):
        order.divided(4)
    assert order != TokenOrder(11, order.parts)


def test_groups_of_ranks_in_zigzag_order_have_it_too():
    order = SequenceSharding("zigzag", 4).token_order(8)  # (0, 7), (1, 6), (2, 5), (3, 4)
    assert order.grouped(2) == SequenceSharding("zigzag", 2).token_order(8)
    assert order.ascending(2, 1).tolist() == [0, 2, 3, 1]


@given(data=st.data(), length=st.integers(1, 12), ranks=st.sampled_from(RANKS))
def test_areas_are_those_of_the_ranks_queries(data, length, ranks, masks):
    mask = data.draw(masks(length, 2))
    order = SequenceSharding("zigzag", ranks).token_order(length)
    by_query = torch.zeros(order.padded_length, dtype=torch.int64)
    by_query[:length] = mask.dense(length).sum((0, 1, 3))
    expected = [by_query[one].sum() for one in order.positions().chunk(ranks)]
    assert areas(mask, order) == expected


@st.composite
def packed(draw):
    """Draws documents of a few and of many tokens, and perhaps a window."""
    lengths = draw(st.lists(st.integers(1, 1000) | st.integers(1, 20), min_size=1, max_size=30))
    window = draw(st.none() | st.integers(1, 500))
    return AttentionMask.of_lengths(lengths) & AttentionMask(window=window)


@given(packed(), st.sampled_from([2, 4]))
def test_the_busiest_rank_has_at_most_a_tenth_more_than_the_mean(mask, ranks):
    length = mask.documents[0][-1]
    order = balanced_order(mask, length, ranks)
    assert order == balanced_order(mask, length, ranks)
    positions = order.positions()
    assert positions.sort().values.tolist() == list(range(order.padded_length))
    for part in positions.chunk(ranks):
        assert part.tolist() == sorted(part.tolist())
    found = areas(mask, order)
    assert sum(found) == mask.area(length)
    if length >= 256 * ranks:
        assert max(found) <= 1.1 * sum(found) / ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_plain_masks_have_the_orders_of_plans(ranks):
    length = 128 * ranks
    for mask, name in (
        (AttentionMask(causal=True), "zigzag"),
        (AttentionMask(), "contiguous"),
        (AttentionMask(causal=True, window=3), "contiguous"),
    ):
        expected = SequenceSharding(name, ranks).token_order(length)
        assert balanced_order(mask, length, ranks) == expected
