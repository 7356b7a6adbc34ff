"""Divides a block of queries and keys into tiles, each computed by one kernel call.

A block is the queries of one rank and the keys of another. Tokens of a rank are in ascending
order, so that the keys of a query are a range of the block's, and the ranges' bounds do not
decrease (`plan_api.context_parallel.mask`): the block's pairs are a band. It is divided by
bisection into tiles that are full; causal, which kernels compute without reading a mask; of a
sliding window; or masked, with few pairs that are computed in vain. What is empty is in no tile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from plan_api._compat import on_host
from plan_api.context_parallel.block_mask import block_mask_of_ranges
from plan_api.context_parallel.mask import AttentionMask, key_ranges
from plan_api.context_parallel.order import Positions

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "AttentionTile", "BlockPairs", "BlockTiles", "SeenQueries", "TileKind", "block_tiles",
    "causal_strips", "divide_causal", "join_equal", "window_strips",
]  # fmt: skip

TileKind: TypeAlias = Literal["full", "causal", "window", "masked", "block"]
_DENSE = 0.9  # of a tile's pairs: if more are attended, it is masked and not divided
_CAUSAL_TILES = 3
_STRIPS = 4
_WINDOW_STRIPS = 8  # of a window's length, so that an eighth is computed in vain
_WINDOW_QUERIES = 2048  # of a call, as the gradients of its keys take 9 times their memory
_CALL_PAIRS = 4096  # a call costs as much as some pairs; fewer than these are computed in vain


@dataclass(frozen=True)
class AttentionTile:
    """Queries and keys of one kernel call, by their places on this rank and in the block.

    It may be several of equal sizes, as documents of one length and sliding windows have them.

    Attributes:
        rows: of the batch.
        queries: a range of this rank's queries, the first one if there are several.
        keys: a range of the block's keys, so too.
        kind: ``"causal"``: there are at least as many keys as queries, of which the last attends to
            all keys, and each other to one fewer than the next; ``"full"``: all attend to all;
            ``"window"``: to equally many, and to the next ones of those of the query before;
            ``"masked"``: to those of the mask, which is the same for all ranges; ``"block"``: so
            too, and the queries and keys are all of a block, whose mask is FlexAttention's.
        count: how many ranges of queries, and of keys, there are: each of queries attends to one.
        step: from the beginning of a range to that of the next; ranges of queries are disjoint,
            and those of keys may overlap.
    """

    rows: slice
    queries: slice
    keys: slice
    kind: TileKind
    count: int = 1
    step: int = 0

    @property
    def products(self) -> int:
        """The number of products of a query and a key that are computed, in a row of the batch."""
        queries: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        beside = {"causal": queries * (queries - 1) // 2, "window": queries * (queries - 1)}
        return self.count * (queries * keys - beside.get(self.kind, 0))

    @property
    def query_ranges(self) -> list[slice]:
        """All ranges of queries."""
        return [_moved(self.queries, number * self.step) for number in range(self.count)]

    def of_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tile's queries of a tensor, as a view.

        Args:
            tensor: (batch, key-value heads, groups, queries, ...) of this rank.

        Returns:
            (batch, key-value heads, groups, queries of the tile, ...), or with a dim of ranges
            before that of queries if there are several.
        """
        return self._part(tensor, self.queries, 3)

    def of_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns the rows of the tile's queries of (batch, heads, queries x rows, ...), so too."""
        return self._part(tensor, self.queries, 2, rows)

    def of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tile's keys of a tensor of (batch, heads, keys, ...), so too."""
        return self._part(tensor, self.keys, 2)

    def add_to_keys(self, total: torch.Tensor, terms: torch.Tensor) -> None:
        """Adds to the tile's keys of a tensor, whose ranges may overlap.

        Args:
            total: (batch, heads, keys, features).
            terms: as `of_keys` returns the tile's part of it.
        """
        length = self.keys.stop - self.keys.start
        each = length if self.count == 1 else self.step
        for first in range(0, length, each):
            last = min(first + each, length)
            keys = slice(self.keys.start + first, self.keys.start + last)
            self._part(total, keys, 2).add_(terms[..., first:last, :])

    def _part(self, tensor: torch.Tensor, places: slice, dim: int, rows: int = 1) -> torch.Tensor:
        length, step = (places.stop - places.start) * rows, self.step * rows
        part = tensor[self.rows].narrow(dim, places.start * rows, (self.count - 1) * step + length)
        return part if self.count == 1 else part.unfold(dim, length, step).movedim(-1, dim + 1)

    def ranges(self) -> Iterator[AttentionTile]:
        """Yields a tile of one range for each of this one's."""
        for number in range(self.count):
            queries, keys = (_moved(one, number * self.step) for one in (self.queries, self.keys))
            yield replace(self, queries=queries, keys=keys, count=1, step=0)

    def split(self, count: int) -> tuple[AttentionTile, AttentionTile]:
        """Returns the tile's first ranges, of this number, and the others."""
        distance = count * self.step
        rest = replace(
            self, queries=_moved(self.queries, distance), keys=_moved(self.keys, distance),
            count=self.count - count,
        )  # fmt: skip
        return replace(self, count=count), rest


@dataclass(frozen=True, eq=False)
class BlockTiles:
    """The tiles of a block, and the range of keys of each of its queries.

    Attributes:
        tiles: disjoint; together they have all pairs of the mask.
        start: place of the first key of each query: int64 of (rows of the mask, queries).
        stop: the place behind its last key.
    """

    tiles: tuple[AttentionTile, ...]
    start: torch.Tensor
    stop: torch.Tensor

    @property
    def keys(self) -> slice | None:
        """The keys that any query attends to, or between those; None: the block is empty."""
        if not self.tiles:
            return None
        places = [one.keys for one in self.tiles]
        return slice(min(one.start for one in places), max(one.stop for one in places))

    def mask(self, tile: AttentionTile, device: torch.device) -> torch.Tensor:
        """Returns the mask of a tile, bool of (queries, keys), true where attended."""
        row = tile.rows.start or 0
        start, stop = _on_device(self, device)
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device)
        return (keys >= start[row, tile.queries, None]) & (keys < stop[row, tile.queries, None])

    @property
    def is_causal(self) -> bool:
        """Whether no tile is masked, and there are no more than causal attention has in any order.

        An early and a late chunk of zig-zag order have three: a causal one each, and a full one.
        """
        plain = all(tile.kind in ("full", "causal") for tile in self.tiles)
        return plain and len(self.tiles) <= _CAUSAL_TILES

    def whole(self) -> AttentionTile | None:
        """Returns the one tile of kind ``"block"`` that has all pairs; None: the block is empty."""
        keys = self.keys
        if keys is None:
            return None
        return AttentionTile(slice(None), slice(0, self.start.shape[1]), keys, "block")

    def block_pairs(self, keys: slice, device: torch.device) -> BlockPairs:
        """Returns the mask of all queries and some keys for FlexAttention.

        Args:
            keys: the places of the keys, outside of which nothing is attended to.
            device: of the attention.
        """
        return _block_pairs(self, keys.start, keys.stop, device)


@dataclass(frozen=True, eq=False)
class BlockPairs:
    """Which pairs of a block FlexAttention computes.

    Attributes:
        mask: of all queries, and of the keys at hand.
        attends: whether each query attends to any key: bool of (rows of the mask, queries).
    """

    mask: BlockMask
    attends: torch.Tensor


class SeenQueries:
    """Notes for which queries tiles have been computed.

    Args:
        rows: of the batch.
        queries: of this rank.
    """

    def __init__(self, rows: int, queries: int) -> None:
        self._rows = [bytearray(queries) for _ in range(rows)]

    def add(self, tile: AttentionTile) -> bool:
        """Adds the queries of a tile; returns whether any of them was there before."""
        rows, ranges = self._rows[tile.rows], tile.query_ranges
        seen = any(1 in row[one] for row in rows for one in ranges)
        for row in rows:
            for one in ranges:
                row[one] = b"\1" * (one.stop - one.start)
        return seen


def divide_causal(tile: AttentionTile, queries: int) -> Iterator[AttentionTile]:
    """Divides a causal tile with as many keys as queries.

    Args:
        tile: of any kind; others than causal ones are not divided.
        queries: a tile of more is halved, into causal ones and a full one.
    """
    first, last, key = tile.queries.start, tile.queries.stop, tile.keys.start
    count = last - first
    if tile.kind != "causal" or count <= queries:
        yield tile
        return
    half = count // 2
    early, late = slice(first, first + half), slice(first + half, last)
    early_keys, late_keys = slice(key, key + half), slice(key + half, tile.keys.stop)
    yield from divide_causal(replace(tile, queries=early, keys=early_keys), queries)
    yield AttentionTile(tile.rows, late, early_keys, "full")
    yield from divide_causal(replace(tile, queries=late, keys=late_keys), queries)


def causal_strips(tile: AttentionTile, shortest: int, longest: int) -> Iterator[AttentionTile]:
    """Divides a causal tile with as many keys as queries, each part with all keys from the first.

    So each query has all of its keys in one tile, and few products above the diagonal are computed
    in vain. A tile of several ranges, which share the cost of a call, has shorter parts: a quarter
    of a range.

    Args:
        tile: of any kind; others than causal ones are not divided.
        shortest: the number of queries of a part of several ranges at least, if they have as many.
        longest: the number of queries of a part at most.
    """
    if tile.kind != "causal":
        yield tile
        return
    first, count, key = tile.queries.start, tile.queries.stop - tile.queries.start, tile.keys.start
    quarter = longest if tile.count == 1 else max(shortest, -(-count // _STRIPS))
    parts = -(-count // min(quarter, longest))
    edges = [count * number // parts for number in range(parts + 1)]
    for start, stop in pairwise(edges):
        own, keys = slice(first + start, first + stop), slice(key, key + stop)
        yield replace(tile, queries=own, keys=keys)


def window_strips(tile: AttentionTile, shortest: int, longest: int) -> Iterator[AttentionTile]:
    """Divides a tile of a sliding window into masked ones, each with all keys of its queries.

    A part has an eighth of the window's length in queries, so that it computes an eighth in vain.
    Parts are joined to tiles of several ranges, all but a shorter last one.

    Args:
        tile: of any kind; others than windows are not divided.
        shortest: the number of queries of a part at least, if there are as many.
        longest: the number of queries of a part at most.
    """
    if tile.kind != "window":
        yield tile
        return
    first, key = tile.queries.start, tile.keys.start
    count = tile.queries.stop - first
    window = tile.keys.stop - key - count + 1
    each = min(max(shortest, window // _WINDOW_STRIPS), longest, count)
    strips, rest = divmod(count, each)

    def part(strip: int, queries: int, ranges: int) -> AttentionTile:
        start, step = strip * each, each if ranges > 1 else 0
        own = slice(first + start, first + start + queries)
        keys = slice(key + start, key + start + queries + window - 1)
        return AttentionTile(tile.rows, own, keys, "masked", ranges, step)

    most = max(1, _WINDOW_QUERIES // each)
    for strip in range(0, strips, most):
        yield part(strip, each, min(most, strips - strip))
    if rest:
        yield part(strips, rest, 1)


def join_equal(tiles: Iterable[AttentionTile]) -> list[AttentionTile]:
    """Returns tiles, of which causal ones of equal sizes and at equal distances are one.

    Args:
        tiles: of one range each, and causal ones with as many keys as queries.
    """
    joined: list[AttentionTile] = []
    last: dict[tuple[int | None, int], int] = {}  # by row and size, the place of the last one
    for tile in tiles:
        size = tile.queries.stop - tile.queries.start
        place = last.get((tile.rows.start, size)) if tile.kind == "causal" else None
        if place is not None and (both := _both(joined[place], tile)) is not None:
            joined[place] = both
            continue
        if tile.kind == "causal":
            last[tile.rows.start, size] = len(joined)
        joined.append(tile)
    return joined


def _both(tile: AttentionTile, other: AttentionTile) -> AttentionTile | None:
    """Returns a tile with one more range; None: this is at another distance."""
    ranges, before = (tile.queries, tile.keys), (tile.count - 1) * tile.step
    step, of_keys = (
        behind.start - one.start - before
        for one, behind in zip(ranges, (other.queries, other.keys), strict=True)
    )
    if step != of_keys or (tile.count > 1 and step != tile.step):
        return None
    return replace(tile, count=tile.count + 1, step=step)


def _moved(places: slice, distance: int) -> slice:
    return slice(places.start + distance, places.stop + distance)


@lru_cache(maxsize=256)
def _on_device(block: BlockTiles, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return block.start.to(device), block.stop.to(device)


@lru_cache(maxsize=64)
def _block_pairs(block: BlockTiles, first: int, last: int, device: torch.device) -> BlockPairs:
    start, stop = _on_device(block, device)
    mask = block_mask_of_ranges(start - first, stop - first, last - first)
    return BlockPairs(mask, start < stop)


@lru_cache(maxsize=1024)
@on_host
def block_tiles(
    mask: AttentionMask, queries: Positions, keys: Positions, length: int, key_length: int
) -> BlockTiles:
    """Returns the tiles of the queries of one rank and the keys of another.

    Args:
        mask: of the sequence; if there are other numbers of queries and keys, without options.
        queries: the positions of the queries; from ``length`` on they are padding.
        keys: the positions of the keys; from ``key_length`` on they are padding.
        length: of the sequence of queries.
        key_length: of the sequence of keys.
    """
    places = torch.cat([torch.arange(*one) for one in keys])
    own = torch.cat([torch.arange(*one) for one in queries])
    tiles: list[AttentionTile] = []
    bounds = []
    for number in range(mask.rows):
        if length == key_length:
            ranges = key_ranges(mask.row(number), length)
            start, stop = torch.tensor(ranges.start), torch.tensor(ranges.stop)
        else:
            start, stop = torch.zeros(length, dtype=torch.int64), torch.full((length,), key_length)
        behind = torch.full((1,), key_length)  # padding attends to nothing
        start, stop = (torch.cat([one, behind])[own.clamp(max=length)] for one in (start, stop))
        start, stop = (torch.searchsorted(places, one) for one in (start, stop))
        bounds.append((start, stop))
        rows = slice(None) if mask.rows == 1 else slice(number, number + 1)
        band = _Band(rows, start.tolist(), stop.tolist())
        tiles += band.tiles(0, len(own), 0, len(places))
    starts, stops = (torch.stack(one) for one in zip(*bounds, strict=True))
    return BlockTiles(tuple(tiles), starts, stops)


class _Band:
    """The pairs of one row of the batch: a range of keys for each query, in ascending order."""

    def __init__(self, rows: slice, start: Sequence[int], stop: Sequence[int]) -> None:
        self._rows, self._start, self._stop = rows, start, stop

    def tiles(self, first: int, last: int, left: int, right: int) -> Iterator[AttentionTile]:
        """Yields tiles of the queries from first to last, with keys from left to right."""
        start, stop = self._start, self._stop
        if first == last:
            return
        left, right = max(start[first], left), min(stop[last - 1], right)
        first = bisect_right(stop, left, first, last)
        last = bisect_left(start, right, first, last)
        if first == last:
            return
        left, right = max(start[first], left), min(stop[last - 1], right)
        if left >= right:  # of queries between documents of the block, which attend to nothing
            return
        # All queries attend to the keys between these.
        inner, outer = max(start[last - 1], left), min(stop[first], right)
        rows = last - first
        if inner <= left and outer >= right:
            yield self._tile(first, last, left, right, "full")
        elif self._is_window(first, last, left, right):
            yield self._tile(first, last, left, right, "window")
        elif self._is_causal(first, last, left, right):
            yield from self.tiles(first, last, left, stop[first] - 1)
            yield self._tile(first, last, stop[first] - 1, stop[last - 1], "causal")
        elif self._is_masked(first, last, left, right):
            yield self._tile(first, last, left, right, "masked")
        elif outer - inner >= rows:
            yield from self.tiles(first, last, left, inner)
            yield self._tile(first, last, inner, outer, "full")
            yield from self.tiles(first, last, outer, right)
        else:
            middle = self._divide(first, last)
            yield from self.tiles(first, middle, left, right)
            yield from self.tiles(middle, last, left, right)

    def _tile(self, first: int, last: int, left: int, right: int, kind: TileKind) -> AttentionTile:
        return AttentionTile(self._rows, slice(first, last), slice(left, right), kind)

    def _is_causal(self, first: int, last: int, left: int, right: int) -> bool:
        """Whether each query attends to one more key than the one before, and all to the first."""
        start, stop = self._start, self._stop
        diagonal = stop[first] - 1
        return (
            left <= diagonal
            and start[last - 1] <= diagonal
            and stop[last - 1] <= right
            and all(stop[place] == diagonal + 1 + place - first for place in range(first, last))
        )

    def _is_window(self, first: int, last: int, left: int, right: int) -> bool:
        """Whether each query attends to the next ones of the keys of the one before."""
        start, stop = self._start, self._stop
        return (
            left == start[first]
            and right == stop[last - 1]
            and all(self._step(place) == (1, 1) for place in range(first, last - 1))
            and stop[first] > start[first]
        )

    def _step(self, place: int) -> tuple[int, int]:
        """Returns by how much the bounds of the next query's keys are greater than a query's."""
        start, stop = self._start, self._stop
        return start[place + 1] - start[place], stop[place + 1] - stop[place]

    def _is_masked(self, first: int, last: int, left: int, right: int) -> bool:
        """Whether few pairs are computed in vain if all are."""
        ranges = zip(self._start[first:last], self._stop[first:last], strict=True)
        attended = sum(max(0, min(stop, right) - max(start, left)) for start, stop in ranges)
        pairs = (last - first) * (right - left)
        return last - first == 1 or pairs - attended <= max(_CALL_PAIRS, (1 - _DENSE) * pairs)

    def _divide(self, first: int, last: int) -> int:
        """Returns the middle, or the edge of a document or window that is nearest to it.

        Between edges the bounds of keys advance evenly, each by no or by one key a query. A query
        where they begin to advance otherwise is the last before the edge.
        """
        middle = (first + last) // 2
        early = next(
            (edge for edge in range(middle, first, -1) if self._is_edge(edge, first)), None
        )
        late = next((edge for edge in range(middle + 1, last) if self._is_edge(edge, first)), None)
        edges = [edge for edge in (early, late) if edge is not None]
        return min(edges, key=lambda edge: abs(edge - middle), default=middle)

    def _is_edge(self, place: int, first: int) -> bool:
        """Whether bounds jump to a query, or advance to it otherwise than to the one before it."""
        step = self._step(place - 1)
        before = self._step(place - 2) if place - 1 > first else step
        return max(step) > 1 or (max(before) <= 1 and before != step)
