"""Explains the padding of a layout: how much there is, where, and which block causes it."""

from collections.abc import Iterator
from dataclasses import replace

from ragged_shard.planner.buffer import BufferMap
from ragged_shard.planner.solver.search import (
    PlanRequest,
    blocked_tensors,
    least_in_any_order,
    solve_in_order,
)

#: The number of block sizes whose cost is computed: those with most elements.
MOST_BLOCKS = 8
#: The number of gaps that are named.
MOST_GAPS = 3
#: A search with smaller blocks only illustrates, so it may give up early.
NODE_LIMIT = 1_000


def explain(layout: BufferMap) -> str:
    """Returns some sentences, a line each; see ``Layout.explain``."""
    parts = (_sizes, _bounds, _large, _costs, _gaps)
    return "\n".join(line for part in parts for line in part(layout))


def _sizes(layout: BufferMap) -> Iterator[str]:
    yield (
        f"{_count(len(layout.specs), 'tensor')} with {_count(layout.total, 'element')} in "
        f"{_count(layout.world_size, 'shard')} of {layout.shard_size:,}; "
        f"padding: {_count(layout.padding, 'element')}, {_percent(layout.padding_ratio)} of the "
        "tensors."
    )


def _bounds(layout: BufferMap) -> Iterator[str]:
    if layout.shard_size == layout.lower_bound:
        yield "No shard can be smaller: the tensors alone need as much."
        return
    above = layout.shard_size / max(layout.lower_bound, 1) - 1
    yield (
        f"That is {_percent(above)} above {layout.lower_bound:,}, the tensors' elements over the "
        "number of shards."
    )
    if not layout.exact:
        yield (
            "The search gave up at its node limit: the smallest shard for this order is between "
            f"{layout.proved_lower_bound:,} and {layout.shard_size:,}."
        )
        return
    request = _request(layout)
    least = least_in_any_order(
        blocked_tensors(request, layout.order), layout.world_size, layout.alignment
    )
    if least == layout.shard_size:
        yield "No order of the tensors allows a smaller shard."
    else:
        yield (
            "No smaller shard is possible in this order of the tensors; another order might "
            f"need less, but none less than {least:,}."
        )


def _large(layout: BufferMap) -> Iterator[str]:
    """Names the tensor of the largest block of which the shard must be a multiple."""
    spread = [i for i in layout.order if layout.specs[i].block > 1 and len(layout.owners(i)) > 2]
    if not spread or layout.shard_size == layout.lower_bound:
        return
    i = max(spread, key=lambda i: layout.specs[i].block)
    block = layout.specs[i].block
    others = len({layout.specs[i].block for i in spread}) - 1
    also = f", and of {_count(others, 'other block size')}" if others else ""
    yield (
        f"{_name(layout, i)} is spread over {len(layout.owners(i)):,} shards, so the shard must be "
        f"a multiple of its block: {layout.shard_size // block:,} x {block:,}{also}."
    )


def _costs(layout: BufferMap) -> Iterator[str]:
    """Names the block size, or the alignment, that costs most, by planning without it."""
    if layout.shard_size == layout.lower_bound:
        return
    request = _request(layout)
    elements: dict[int, int] = {}
    for spec in layout.specs:
        if spec.block > 1 and spec.numel:
            elements[spec.block] = elements.get(spec.block, 0) + spec.numel
    most = sorted(elements, key=lambda block: (-elements[block], block))[:MOST_BLOCKS]
    shards = {}
    for block in most:
        specs = tuple(
            replace(spec, block=1) if spec.block == block else spec for spec in layout.specs
        )
        shards[block] = solve_in_order(replace(request, specs=specs), layout.order).shard_size
    if layout.alignment > 1:
        free = replace(request, alignment=1, align_starts=False)
        size = solve_in_order(free, layout.order).shard_size
        if size < min(shards.values(), default=layout.shard_size):
            yield (
                f"The alignment costs most: without it the shard would have {size:,} elements, "
                f"{_padding(layout, size)} padding."
            )
            return
    if not shards:
        return
    block = min(shards, key=lambda block: (shards[block], -block))
    if shards[block] >= layout.shard_size:
        yield "No single block size forces this: with any one of them at 1, others need as much."
        return
    of_block = [i for i in layout.order if layout.specs[i].block == block and layout.specs[i].numel]
    more = f" and {_count(len(of_block) - 1, 'more tensor')}" if len(of_block) > 1 else ""
    yield (
        f"The block of {block:,} costs most: were it 1, for {_name(layout, of_block[0])}{more}, "
        f"the shard would have {shards[block]:,} elements, "
        f"{_padding(layout, shards[block])} padding."
    )


def _gaps(layout: BufferMap) -> Iterator[str]:
    """Locates the padding."""
    if not layout.padding:
        return
    before = {layout.starts[i]: i for i in layout.order if layout.specs[i].numel}
    gaps = layout.padding_intervals()
    inner = sorted(
        (gap for gap in gaps if gap.stop in before), key=lambda gap: (-gap.size, gap.start)
    )
    if not inner:
        yield "All of the padding is after the last tensor."
        return
    between = sum(gap.size for gap in inner)
    yield (
        f"{_count(between, 'element')} of padding in {_count(len(inner), 'gap')} before "
        f"tensors, {layout.padding - between:,} after the last one."
    )
    for gap in inner[:MOST_GAPS]:
        i = before[gap.stop]
        spec = layout.specs[i]
        what = f"{_name(layout, i)} ({_count(spec.numel, 'element')} in blocks of {spec.block:,})"
        if gap.start // layout.shard_size == (gap.stop + spec.numel - 1) // layout.shard_size:
            why = f"its start is aligned to {layout.alignment:,}"
        elif gap.stop % layout.shard_size == 0:
            shard = gap.stop // layout.shard_size - 1
            why = f"it cannot start in what is left of shard {shard:,}"
        else:
            boundary = gap.stop // layout.shard_size + 1
            why = f"shard {boundary:,} then starts between two of its blocks"
        yield f"{what} has {_count(gap.size, 'element')} of padding before it: {why}."


def _request(layout: BufferMap) -> PlanRequest:
    return PlanRequest(
        layout.specs, layout.world_size, layout.alignment, layout.align_starts, NODE_LIMIT
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _name(layout: BufferMap, i: int) -> str:
    return repr(layout.specs[i].name)


def _padding(layout: BufferMap, shard: int) -> str:
    ratio = (shard * layout.world_size - layout.total) / layout.total
    return _percent(ratio)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"
