"""The search for the smallest shard in plain Python: the definition of the C++ core.

Note [the search]
    For one shard size S, placing each tensor at the earliest legal start decides in one pass
    whether all fit: ending earlier never hurts a later tensor. But a larger S may fit worse (a
    tensor with two boundaries inside forces S to be a multiple of its block), so bisection does
    not find the smallest. Instead ranges of S are refuted, the leftmost first: ``may_fit`` places
    the tensors as early as *any* S of the range allows, and if they do not fit then, no S of the
    range is possible. A refuted range is followed by one of twice the length; one that cannot be
    refuted is halved, down to a single S, for which the result is exact. A tensor of more than
    2 * S elements has two boundaries inside wherever it starts, so only multiples of the blocks of
    such tensors are tried.

Source: veScale-FSDP, section 5, states the problem; it solves it to a factor of two. The tests
compare this module, the C++ core, and an exhaustive search. Tensors come in the order of the
buffer, with ``1 <= block <= numel`` unless empty; aligned starts are in their sizes already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ragged_shard.planner.spec import MOST_ELEMENTS


@dataclass(frozen=True, slots=True)
class BlockedTensor:
    """One tensor: its size, and its blocks, which no shard boundary may split, in elements."""

    numel: int
    block: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        any: whether there is a layout whose buffer has at most 2**63 - 1 elements. If not, the
            other attributes have no meaning.
        shard: elements of a shard.
        proved: no shard is smaller; equal to ``shard`` if the search ended.
        nodes: calls of ``may_fit`` before it ended or gave up.
        starts: start of each tensor in the buffer.
    """

    any: bool
    shard: int
    proved: int
    nodes: int
    starts: list[int]


@dataclass(frozen=True, slots=True)
class Cursor:
    """The end of the tensors placed so far.

    For each S of a range it is ``boundary * S + offset`` or later, and exactly that if the range
    is a single S. Counting from a boundary, not from 0, makes ranges useful: a tensor that was
    moved to boundary k ends at k * S + numel, whatever S is.
    """

    boundary: int
    offset: int


def round_down(value: int, step: int) -> int:
    """Returns the largest multiple of ``step`` that is at most ``value``."""
    return value // step * step


def round_up(value: int, step: int) -> int:
    """Returns the smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


def advance(cursor: Cursor, tensor: BlockedTensor, step: int, low: int, high: int) -> Cursor | None:
    """Returns the cursor after a tensor, or None if it fits nowhere.

    Args:
        cursor: the end of the tensors before it.
        tensor: the one to place.
        step: every shard size of the range is a multiple of it.
        low: smallest shard size of the range.
        high: largest.
    """
    numel, block = tensor.numel, tensor.block
    after = Cursor(cursor.boundary, cursor.offset + numel)
    if numel == 0 or block == 1:
        return after  # fits wherever the previous one ends
    ahead = cursor.offset // low + 1  # the next boundary, counted from the cursor's
    room = ahead * high - cursor.offset
    if cursor.offset // high + 1 != ahead or numel <= room:
        return after  # for some S it may fit without padding
    # From here on it crosses the next boundary, whatever S.
    if step % block == 0:  # boundaries are multiples of the block: so is the padding's end
        return Cursor(cursor.boundary, round_up(cursor.offset, block) + numel)
    any_multiple = round_down(high, lcm(step, block)) >= low
    before = round_down(room, block)  # whole blocks ahead of the boundary
    if before and (numel - before <= high or any_multiple):
        return Cursor(cursor.boundary + ahead, numel - before)
    # It starts at that boundary, or crosses the one after it with as many blocks as fit.
    if numel <= high or any_multiple:
        return Cursor(cursor.boundary + ahead, numel)
    whole = round_down(high, block)
    if whole == 0 or numel - whole > high:
        return None
    return Cursor(cursor.boundary + ahead + 1, numel - whole)


def cursors(
    tensors: Sequence[BlockedTensor], ranks: int, step: int, low: int, high: int
) -> list[Cursor]:
    """Returns the cursors after each tensor, as many as fit before the buffer's end."""
    found: list[Cursor] = []
    cursor: Cursor | None = Cursor(0, 0)
    remaining = sum(tensor.numel for tensor in tensors)
    for tensor in tensors:
        assert cursor is not None
        if remaining > (ranks - cursor.boundary) * high - cursor.offset:
            return found
        cursor = advance(cursor, tensor, step, low, high)
        if cursor is None or cursor.offset > (ranks - cursor.boundary) * high:
            return found
        found.append(cursor)
        remaining -= tensor.numel
    return found


def may_fit(tensors: Sequence[BlockedTensor], ranks: int, step: int, low: int, high: int) -> bool:
    """Returns False only if no multiple of ``step`` from ``low`` to ``high`` holds the tensors.

    Exact if ``low == high``.
    """
    return len(cursors(tensors, ranks, step, low, high)) == len(tensors)


def place(tensors: Sequence[BlockedTensor], ranks: int, shard: int) -> list[int]:
    """Returns the earliest legal start of each tensor, for a shard size that fits."""
    ends = cursors(tensors, ranks, 1, shard, shard)
    return [
        end.boundary * shard + end.offset - tensor.numel
        for end, tensor in zip(ends, tensors, strict=True)
    ]


def least_shard(tensors: Sequence[BlockedTensor], ranks: int, step: int) -> int:
    """Returns the size that every shard has at least, whatever the order."""
    total = sum(tensor.numel for tensor in tensors)
    largest = max((tensor.block for tensor in tensors if tensor.numel), default=0)
    return round_up(max(-(-total // ranks), largest), step)


def any_that_fits(
    tensors: Sequence[BlockedTensor], ranks: int, step: int, first: int, most: int
) -> int | None:
    """Returns a small shard size from ``first`` to ``most`` that fits, not always the smallest.

    For each step that large tensors could require, it doubles the distance from ``first`` and
    halves it again: the paper's search.
    """
    best = None
    steps = [step]
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.block)):
        steps.append(lcm(steps[-1], tensor.block))
    for fromkey in dict.fromkeys(steps):
        top = (most if best is None else best) // fromkey
        bottom = -(-first // fromkey)
        if bottom > top:
            continue
        low, high = bottom - 1, bottom
        while not may_fit(tensors, ranks, step, high * fromkey, high * fromkey) and high < top:
            low, high = high, bottom + min(2 * (high - bottom) + 1, top - bottom)
        if not may_fit(tensors, ranks, step, high * fromkey, high * fromkey):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if may_fit(tensors, ranks, step, middle * fromkey, middle * fromkey):
                high = middle
            else:
                low = middle
        best = high * fromkey
    return best


def search(
    tensors: Sequence[BlockedTensor], ranks: int, step: int, most_nodes: int
) -> SearchResult:
    """Returns the smallest shard for tensors in this order.

    Args:
        tensors: in the order of the buffer.
        ranks: number of shards.
        step: the shard's size is a multiple of it.
        most_nodes: after so many calls of ``may_fit`` it gives up and returns the best shard that
            it knows. It never reads a clock: every rank must find the same.
    """
    total = sum(tensor.numel for tensor in tensors)
    # All in the first shard always fits, but the buffer may be too large.
    most = min(round_up(total, step), round_down(MOST_ELEMENTS // ranks, step))
    nodes, first = 0, least_shard(tensors, ranks, step)  # all below `first` is refuted
    while first <= most and nodes < most_nodes:
        large = [tensor for tensor in tensors if tensor.numel > 2 * first]
        # Up to `until` the same tensors are large.
        until = min([most, *((tensor.numel - 1) // 2 for tensor in large)])
        joint = lcm(step, *(tensor.block for tensor in large))
        first, count = round_up(first, joint), 1
        while first <= until and nodes < most_nodes:
            count = min(count, (until - first) // joint + 1)
            nodes += 1
            if not may_fit(tensors, ranks, joint, first, first + (count - 1) * joint):
                first, count = first + count * joint, 2 * count
            elif count == 1:
                return SearchResult(True, first, first, nodes, place(tensors, ranks, first))
            else:
                count //= 2
        if first > until:
            first = until + 1
    best = any_that_fits(tensors, ranks, step, first, most)
    if best is None:
        return SearchResult(False, 0, first, nodes, [])
    return SearchResult(True, best, first, nodes, place(tensors, ranks, best))


def padding_to(after: Cursor, cursor: Cursor, tensor: BlockedTensor, shard: int) -> int:
    """Returns the elements between a cursor and the tensor placed after it."""
    boundaries = after.boundary - cursor.boundary
    return boundaries * shard + after.offset - tensor.numel - cursor.offset


def arrange(tensors: Sequence[BlockedTensor], ranks: int, shard: int) -> list[int]:
    """Returns the indices of the tensors in an order made for one shard size.

    Tensors are placed one by one, each time the one that needs the least padding: of equals the one
    with the largest block, then the largest, then the first. That is best-fit decreasing of bin
    packing, if blocks are whole tensors.

    Args:
        tensors: the group.
        ranks: number of shards.
        shard: elements of each.

    Returns:
        Each index of ``tensors`` once, or nothing if the tensors do not fit in this order.
    """
    unplaced = sorted(range(len(tensors)), key=lambda i: (-tensors[i].block, -tensors[i].numel, i))
    order: list[int] = []
    cursor = Cursor(0, 0)
    while unplaced:
        choices = []
        for i in unplaced:
            after = advance(cursor, tensors[i], 1, shard, shard)
            if after is not None:
                choices.append((padding_to(after, cursor, tensors[i], shard), i))
        if not choices:
            return []
        _, chosen = min(choices, key=lambda choice: choice[0])  # the first of equals
        after = advance(cursor, tensors[chosen], 1, shard, shard)
        assert after is not None
        cursor = after
        if cursor.boundary * shard + cursor.offset > ranks * shard:
            return []
        unplaced.remove(chosen)
        order.append(chosen)
    return order
