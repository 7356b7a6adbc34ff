"""Plans a model at many world sizes and block sizes, and recommends a world size."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ragged_shard.planner.layout import Layout
from ragged_shard.planner.models.shapes import ModelShapes, specs_of
from ragged_shard.planner.plan import plan_layout
from ragged_shard.planner.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """The settings that all points of a sweep share.

    Attributes:
        target: The matrices that have blocks of rows, as ``shapes.resolve_target`` returns it.
        order: The order of a group's tensors, by a name that ``plan_layout`` takes.
        alignment: The shard's size is a multiple of it, in elements.
    """

    target: str
    order: str = "given"
    alignment: int = 1


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of one group, in elements; ``identical`` groups of the model share it."""

    name: str
    total: int
    shard_size: int
    padding: int
    proved_lower_bound: int
    exact: bool
    identical: int

    @property
    def padding_ratio(self) -> float:
        """Padding over the elements of the group's tensors."""
        return self.padding / self.total if self.total else 0.0


@dataclass(frozen=True)
class SweepPoint:
    """A model planned at one world size and one block size.

    Attributes:
        world_size: Ranks of the FSDP group.
        rows: Rows per block.
        groups: The plan of every group, in the model's order.
    """

    world_size: int
    rows: int
    groups: tuple[GroupPlan, ...]

    @cached_property
    def shard_size(self) -> int:
        """Elements that each rank holds of the whole model, padding included."""
        return sum(group.shard_size for group in self.groups)

    @cached_property
    def padding(self) -> int:
        """Padding of all buffers, in elements over all ranks."""
        return sum(group.padding for group in self.groups)

    @cached_property
    def padding_ratio(self) -> float:
        """Padding over the model's elements."""
        return self.padding / max(1, sum(group.total for group in self.groups))

    @cached_property
    def gap(self) -> float:
        """How far the shards may be above the smallest for the order: 0 where that is proved."""
        proved = sum(group.proved_lower_bound for group in self.groups)
        return self.shard_size / proved - 1 if proved else 0.0

    @cached_property
    def exact(self) -> bool:
        """Whether every group's shard is proved to be the smallest for the order."""
        return all(group.exact for group in self.groups)

    @cached_property
    def worst(self) -> GroupPlan:
        """The group with the largest share of padding; the first of equals."""
        return max(self.groups, key=lambda group: group.padding_ratio)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The point of a sweep that is recommended for one block size.

    Attributes:
        point: The recommended point.
        least: The point with the least padding: the same, or a smaller world size close to it.
        tolerance: Differences in padding up to this share of the model count as none.
    """

    point: SweepPoint
    least: SweepPoint
    tolerance: float

    def sentence(self) -> str:
        """Returns the recommendation and its reason, as one sentence."""
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


def sweep(
    model: ModelShapes, world_sizes: Sequence[int], rows: Sequence[int], settings: SweepSettings
) -> tuple[SweepPoint, ...]:
    """Plans every group of a model for every block size and world size, in that nesting.

    Groups whose tensors have the same shapes and blocks, as the layers of a transformer do, are
    planned once per point.

    Args:
        model: The model.
        world_sizes: Sizes of the FSDP group.
        rows: Rows per block.
        settings: The settings that all points share.

    Raises:
        ValueError: A number of rows is below 1, or ``plan_layout`` refuses a world size, the
            alignment or the order.
    """
    points = []
    for count in rows:
        _check_rows(count)
        specs = [specs_of(group, count, settings.target) for group in model.groups]
        firsts = _first_identical(specs)
        for world_size in world_sizes:
            plans = _plans(model, specs, firsts, world_size, settings)
            points.append(SweepPoint(world_size, count, plans))
    return tuple(points)


def plan_group(model: ModelShapes, name: str, point: SweepPoint, settings: SweepSettings) -> Layout:
    """Returns the layout of one group at a point of a sweep.

    Raises:
        ValueError: As ``sweep``, or no group has this name.
    """
    (group,) = model.only(name).groups
    specs = specs_of(group, point.rows, settings.target)
    return _plan(specs, point.world_size, settings)


def recommend(
    points: Sequence[SweepPoint], *, tolerance: float = 0.0
) -> tuple[Recommendation, ...]:
    """Recommends a world size for every block size of a sweep, in the sweep's order.

    Args:
        points: The sweep.
        tolerance: Sizes whose padding exceeds the least by no more than this share of the model
            count as equal, and the largest of equals is recommended: each rank then holds less.

    Raises:
        ValueError: There are no points, or the tolerance is negative.
    """
    if not points:
        raise ValueError("points: expected at least one, got none; sweep at least one world size")
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expected a share of the model, 0 or more, got {tolerance}")
    recommendations = []
    for count in dict.fromkeys(point.rows for point in points):
        candidates = [point for point in points if point.rows == count]
        # The largest of equals, so that a recommendation without tolerance is the least itself.
        least = min(candidates, key=lambda point: (point.padding_ratio, -point.world_size))
        limit = least.padding_ratio + tolerance
        close = [point for point in candidates if point.padding_ratio <= limit]
        best = max(close, key=lambda point: point.world_size)
        recommendations.append(Recommendation(best, least, tolerance))
    return tuple(recommendations)


def percent(share: float) -> str:
    """Formats a share as a percentage, with ``<0.001 %`` for less than it can show."""
    if 0 < share < 0.000005:
        return "<0.001 %"
    return f"{100 * share:.3f} %"


def rows(count: int) -> str:
    """Formats the size of a block: ``"1 row"`` or ``"128 rows"``."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def _plan(specs: tuple[TensorSpec, ...], world_size: int, settings: SweepSettings) -> Layout:
    return plan_layout(specs, world_size, alignment=settings.alignment, order=settings.order)


def _plans(
    model: ModelShapes,
    specs: Sequence[tuple[TensorSpec, ...]],
    firsts: Sequence[int],
    world_size: int,
    settings: SweepSettings,
) -> tuple[GroupPlan, ...]:
    counts = Counter(firsts)
    layouts = {first: _plan(specs[first], world_size, settings) for first in counts}
    return tuple(
        GroupPlan(
            name=group.name,
            total=layouts[first].total,
            shard_size=layouts[first].shard_size,
            padding=layouts[first].padding,
            proved_lower_bound=layouts[first].proved_lower_bound,
            exact=layouts[first].exact,
            identical=counts[first],
        )
        for group, first in zip(model.groups, firsts, strict=True)
    )


def _first_identical(specs: Sequence[tuple[TensorSpec, ...]]) -> list[int]:
    """Returns for each group the index of the first with the same shapes and blocks."""
    firsts: dict[tuple[tuple[tuple[int, ...] | None, int], ...], int] = {}
    return [
        firsts.setdefault(tuple((spec.shape, spec.block) for spec in group), index)
        for index, group in enumerate(specs)
    ]


def _check_rows(count: int) -> None:
    if count < 1:
        raise ValueError(f"rows: expected at least 1 row per block, got {count}")
