"""The FSDP group size with the least padding."""

from collections.abc import Sequence
from dataclasses import dataclass

from ragged_shard.planner.sweep import Point
from ragged_shard.planner.wording import percent, rows


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The point of a sweep that is proposed for one granularity.

    Attributes:
        point: The proposal.
        least: The point with the least padding, the proposal itself or a smaller one close to it.
        tolerance: Padding that counts as nothing, as a share of the model.
    """

    point: Point
    least: Point
    tolerance: float

    def sentence(self) -> str:
        """The proposal and why, as one sentence."""
        point, least = self.point, self.least
        text = (
            f"{rows(point.rows)}: shard over {point.world_size:,} ranks, "
            f"{percent(point.padding_ratio)} padding, {point.shard_size:,} elements per rank"
        )
        if least is point:
            return f"{text}; no size has less."
        return (
            f"{text}; {least.world_size:,} ranks have the least, {percent(least.padding_ratio)}, "
            f"which is within the tolerance of {percent(self.tolerance)}."
        )


def recommend(points: Sequence[Point], *, tolerance: float = 0.0) -> tuple[Recommendation, ...]:
    """Proposes a world size for every granularity of a sweep, in the sweep's order.

    Args:
        points: The sweep.
        tolerance: Sizes whose padding is above the least by no more than this share of the model
            count as equal, and of equals the largest is proposed: every rank then holds less.

    Raises:
        ValueError: There are no points, or the tolerance is negative.
    """
    if not points:
        raise ValueError("points is empty; sweep at least one world size")
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it is a share of the model, 0 or more")
    found = []
    for count in dict.fromkeys(point.rows for point in points):
        candidates = [point for point in points if point.rows == count]
        # Of equals the largest here too, so that a proposal within no tolerance is the least.
        least = min(candidates, key=lambda point: (point.padding_ratio, -point.world_size))
        limit = least.padding_ratio + tolerance
        close = [point for point in candidates if point.padding_ratio <= limit]
        best = max(close, key=lambda point: point.world_size)
        found.append(Recommendation(best, least, tolerance))
    return tuple(found)
