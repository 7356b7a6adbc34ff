"""Whether a layout keeps its promises, checked from their definition and not from the search."""

from ragged_shard.planner.layout import Layout
from ragged_shard.planner.spec import TensorSpec, check_size


def verify(layout: Layout) -> None:
    """Check that no boundary cuts a block, that tensors do not overlap, and that all fits.

    The three constraints of veScale-FSDP, section 5: every boundary inside a tensor falls between
    two blocks; each tensor is contiguous and they follow one another in ``order``; shards are
    equal, of a multiple of the alignment. Then what ``align_starts``, ``exact`` and
    ``proved_lower_bound`` say of it, as far as it can be checked without a search. Takes time
    proportional to the number of tensors.

    Raises:
        ValueError: the first constraint that does not hold, with the tensor and the numbers.
    """
    _check_fields(layout)
    shard, end, before = layout.shard_size, 0, "the buffer's start"
    for i in layout.order:
        spec, start = layout.specs[i], layout.starts[i]
        who = f"tensor {i} ({spec.name!r})"
        if start < end:
            raise ValueError(f"{who}: starts at {start}, wants {end} or more, behind {before}")
        end, before = start + spec.numel, who
        if end > layout.buffer_size:
            raise ValueError(
                f"{who}: ends at {end}, wants at most {layout.buffer_size}, the end of "
                f"{layout.world_size} shards of {shard}"
            )
        if layout.align_starts and start % layout.alignment:
            raise ValueError(f"{who}: starts at {start}, wants a multiple of {layout.alignment}")
        if spec.numel:
            _check_blocks(who, spec, start, shard)


def _check_blocks(who: str, spec: TensorSpec, start: int, shard: int) -> None:
    """Raise if a boundary strictly inside the tensor cuts a block."""
    first = (start // shard + 1) * shard
    last = (start + spec.numel - 1) // shard * shard
    # Between the first boundary and the last they are `shard` apart: two decide for all.
    for boundary in (first, first + shard):
        if boundary <= last and (boundary - start) % spec.block:
            block = (boundary - start) // spec.block
            raise ValueError(
                f"{who}: the boundary of shards at {boundary} cuts its block number {block}, "
                f"elements {start + block * spec.block} to "
                f"{min(start + (block + 1) * spec.block, start + spec.numel)} of the buffer; "
                f"wants it a multiple of {spec.block} behind the start {start}"
            )


def _check_fields(layout: Layout) -> None:
    """Raise if the fields alone, whatever the places, are wrong."""
    for name in ("world_size", "alignment", "shard_size", "proved_lower_bound"):
        least = 1 if name in ("world_size", "alignment") else 0
        check_size(f"Layout {name}", getattr(layout, name), least=least)
    for name in ("align_starts", "exact"):
        if not isinstance(getattr(layout, name), bool):
            raise ValueError(f"Layout {name}: got {getattr(layout, name)!r}, wants a bool")
    check_size("Layout buffer_size", layout.buffer_size, least=0)
    if layout.shard_size % layout.alignment:
        raise ValueError(
            f"Layout shard_size: got {layout.shard_size}, wants a multiple of the alignment, "
            f"{layout.alignment}"
        )
    number = len(layout.specs)
    for place in layout.order:
        check_size("Layout order", place, least=0)
    if sorted(layout.order) != list(range(number)):
        raise ValueError(f"Layout order: got {layout.order}, wants each of 0 to {number - 1} once")
    if len(layout.starts) != number:
        raise ValueError(f"Layout starts: got {len(layout.starts)}, wants {number}, one per spec")
    for start in layout.starts:
        check_size("Layout starts", start, least=0)
    if layout.proved_lower_bound > layout.shard_size or (
        layout.exact and layout.proved_lower_bound != layout.shard_size
    ):
        raise ValueError(
            f"Layout proved_lower_bound: got {layout.proved_lower_bound} with exact="
            f"{layout.exact}, wants at most shard_size={layout.shard_size}, and equal if exact"
        )
