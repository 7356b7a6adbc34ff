"""Tiles of blocks: each pair of a mask is computed once, and few others are."""

from contextlib import contextmanager

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api import AttentionMask
from plan_api.context_parallel import SequenceSharding, TokenOrder, tiles
from plan_api.context_parallel.order import ORDERS
from plan_api.context_parallel.tiles import (
    AttentionTile,
    block_tiles,
    causal_strips,
    divide_causal,
    join_equal,
    window_strips,
)


@st.composite
def orders(draw, length):
    """Draws an order of up to 4 ranks, of the plans' or of any tokens."""
    ranks = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return SequenceSharding(draw(st.sampled_from(ORDERS)), ranks).token_order(length)
    each = -(-length // ranks)
    positions = draw(st.permutations(range(each * ranks)))
    parts = [sorted(positions[n * each : (n + 1) * each]) for n in range(ranks)]
    return TokenOrder(length, tuple(tuple((one, one + 1) for one in part) for part in parts))


def pairs_of(block, mask, order, rank, keys, strip):
    """Counts the pairs that the tiles of a block compute, at their positions.

    Causal tiles and windows are divided as for kernels, into strips where these are given.
    """
    own = torch.cat([torch.arange(*one) for one in order.parts[rank]])
    counts = torch.zeros(mask.rows, order.padded_length, order.padded_length, dtype=torch.int)
    divided = [part for whole in block.tiles for part in divide_causal(whole, 5)]
    joined = join_equal(divided)
    assert sum(tile.products for tile in joined) == sum(tile.products for tile in divided)
    if strip:
        joined = [part for one in joined for part in window_strips(one, 1, strip)]
        joined = [part for one in joined for part in causal_strips(one, 1, strip)]
    for tile in (part for one in joined for part in one.ranges()):
        if tile.kind == "causal":
            assert tile.queries.stop - tile.queries.start <= (strip or 5)
            assert (
                strip or tile.queries.stop - tile.queries.start == tile.keys.stop - tile.keys.start
            )
        assert tile.products > 0  # kernels divide by the numbers of queries and keys
        queries, places = own[tile.queries], keys[tile.keys]
        computed = torch.ones(len(queries), len(places), dtype=torch.int)
        if tile.kind == "causal":
            computed = computed.tril(len(places) - len(queries))
        if tile.kind == "window":
            computed = computed.tril(len(places) - len(queries)).triu()
        assert tile.products == computed.sum()
        if tile.kind == "masked":
            computed = block.mask(tile, torch.device("cpu")).int()
        rows = tile.rows
        counts[rows, queries[:, None], places] += computed
    return counts


@given(
    data=st.data(), length=st.integers(1, 20), call=st.sampled_from([0, 5]),
    strip=st.sampled_from([None, 2]),
)  # fmt: skip
def test_each_pair_is_computed_exactly_once(data, length, call, strip, masks, pairs):
    """By blocks of ranks, and over all keys in the sequence's order."""
    mask, order = data.draw(masks(length, 2)), data.draw(orders(length))
    by_block = over_all = 0
    with pairs_of_a_call(call):
        for rank in range(order.ranks):
            for source in range(order.ranks):
                parts = order.parts[rank], order.parts[source]
                block = block_tiles(mask, *parts, length, length)
                keys = torch.cat([torch.arange(*one) for one in parts[1]])
                by_block += pairs_of(block, mask, order, rank, keys, strip)
            every = ((0, order.padded_length),)
            block = block_tiles(mask, order.parts[rank], every, length, length)
            keys = torch.arange(order.padded_length)
            over_all += pairs_of(block, mask, order, rank, keys, strip)
    expected = torch.zeros_like(by_block)
    expected[:, :length, :length] = pairs(mask, length)
    assert torch.equal(by_block, expected)
    assert torch.equal(over_all, expected)


@contextmanager
def pairs_of_a_call(number):
    """Sets how many pairs a tile computes in vain rather than be divided."""
    before, tiles._CALL_PAIRS = tiles._CALL_PAIRS, number
    block_tiles.cache_clear()
    try:
        yield
    finally:
        tiles._CALL_PAIRS = before
        block_tiles.cache_clear()


def computed(mask, length):
    every = ((0, length),)
    block = block_tiles(mask, every, every, length, length)
    return block.tiles, sum(tile.products for tile in block.tiles)


def test_plain_masks_are_one_tile():
    for mask, kind in ((AttentionMask(), "full"), (AttentionMask(causal=True), "causal")):
        (tile,), _ = computed(mask, 512)
        assert tile.kind == kind


def test_few_products_of_documents_and_windows_are_in_vain():
    """Documents of 100 tokens and more are causal tiles."""
    documents = AttentionMask.of_lengths([100, 1000, 340, 608])
    found, products = computed(documents, 2048)
    assert products == documents.area(2048)
    assert [tile.kind for tile in found] == ["causal"] * 4
    for window in (256, 1024):
        mask = AttentionMask(causal=True, window=window)
        found, products = computed(mask, 2048)
        assert products == mask.area(2048)
        assert [tile.kind for tile in found] == ["causal", "window"]
        parts = [part for tile in found for part in window_strips(tile, 32, 128)]
        assert sum(tile.products for tile in parts) < 1.15 * mask.area(2048)
    short = AttentionMask.of_lengths([20] * 50)
    found, products = computed(short, 1000)
    assert len(found) <= 50


def test_cross_attention_without_a_mask_is_one_tile():
    (tile,) = block_tiles(AttentionMask(), ((0, 4),), ((0, 8),), 3, 7).tiles
    assert (tile.queries, tile.keys, tile.kind) == (slice(0, 3), slice(0, 7), "full")


def test_documents_of_one_length_are_one_tile_of_each_of_their_strips():
    tiles = [
        AttentionTile(slice(None), slice(first, last), slice(first, last), kind)
        for first, last, kind in [
            (0, 6, "causal"), (6, 12, "causal"), (12, 18, "causal"), (18, 24, "full"),
            (24, 28, "causal"), (28, 34, "causal"),
        ]
    ]  # fmt: skip
    documents, full, short, other = join_equal(tiles)
    assert (documents.count, documents.step, documents.products) == (3, 6, 3 * 21)
    assert [full, short, other] == tiles[3:]  # of which the last is at another distance
    assert [one.start for one in documents.query_ranges] == [0, 6, 12]
    early, late = causal_strips(documents, 3, 3)
    assert (early.queries, early.keys, early.count) == (slice(0, 3), slice(0, 3), 3)
    assert (late.queries, late.keys, late.count) == (slice(3, 6), slice(0, 6), 3)
    assert [*causal_strips(full, 2, 3)] == [full]
    numbers = torch.arange(68).view(1, 1, 68)  # two for each query
    assert late.of_rows(numbers, 2)[0, 0].tolist() == [
        [12 * number + place for place in range(6, 12)] for number in range(3)
    ]
    assert late.of_keys(numbers)[0, 0, 1].tolist() == [6, 7, 8, 9, 10, 11]
    assert late.of_queries(numbers[None])[0, 0, 0, 1].tolist() == [9, 10, 11]


def test_strips_of_several_documents_are_a_quarter_within_bounds():
    def strips(length, count):
        one = slice(0, length)
        tile = AttentionTile(slice(None), one, one, "causal", count, length)
        return [one.queries.stop - one.queries.start for one in causal_strips(tile, 64, 128)]

    assert strips(40, 2) == [40]
    assert strips(130, 2) == [43, 43, 44]
    assert strips(400, 2) == [100] * 4
    assert strips(1024, 2) == [128] * 8
    assert strips(130, 1) == [65, 65]


def test_strips_of_a_window_are_one_tile_and_a_rest():
    """Of queries 10 to 29, each attending to 4 keys from its own place on."""
    window = AttentionTile(slice(None), slice(10, 30), slice(0, 23), "window")
    assert window.products == 20 * 4
    strips, rest = window_strips(window, 6, 8)
    assert (strips.queries, strips.keys) == (slice(10, 16), slice(0, 9))
    assert (strips.kind, strips.count, strips.step) == ("masked", 3, 6)
    assert (rest.queries, rest.keys, rest.count) == (slice(28, 30), slice(18, 23), 1)
    assert [one.keys.start for one in strips.ranges()] == [0, 6, 12]
    (short,) = window_strips(window, 32, 128)
    assert (short.queries, short.keys, short.count) == (window.queries, window.keys, 1)
    long = AttentionTile(slice(None), slice(0, 3000), slice(0, 3799), "window")
    parts = [(one.queries.start, one.count, one.step) for one in window_strips(long, 32, 128)]
    assert parts == [(0, 20, 100), (2000, 10, 100)]  # an eighth of 800; 2048 queries at most


class PlacesOfSums(TorchDispatchMode):
    """Notes which elements of memory operators add to in place."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            to = args[0]
            places = torch.arange(to.untyped_storage().nbytes() // to.element_size())
            self.found.append(places.as_strided(to.shape, to.stride(), to.storage_offset()))
        return func(*args, **(kwargs or {}))


def test_terms_of_ranges_that_overlap_are_added_to_all_their_keys():
    """To no key twice in one operator, whose threads would both write it."""
    tile = AttentionTile(slice(None), slice(0, 3), slice(1, 9), "masked", count=3, step=3)
    total = torch.zeros(1, 1, 16, 1)
    with PlacesOfSums() as sums:
        tile.add_to_keys(total, torch.ones_like(tile.of_keys(total)))
    assert sums.found
    assert all(places.unique().numel() == places.numel() for places in sums.found)
    assert total.flatten().int().tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3, 2, 2, 2, 1, 1, 1, 0]
