"""Plans a model at many world sizes and granularities."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ragged_shard.planner.blocks import specs_of
from ragged_shard.planner.layout import Layout
from ragged_shard.planner.model import Model
from ragged_shard.planner.solve import plan_layout
from ragged_shard.planner.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same at every point of a sweep.

    Attributes:
        target: The matrices that have blocks of rows, as ``blocks.resolve_target`` returns it.
        order: The order of a group's tensors, as ``plan_layout`` takes it by name.
        alignment: What the shard's size is a multiple of, in elements.
    """

    target: str
    order: str = "given"
    alignment: int = 1


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of one group, in elements; ``alike`` groups of the model have the same."""

    name: str
    total: int
    shard_size: int
    padding: int
    proved_lower_bound: int
    exact: bool
    alike: int

    @property
    def padding_ratio(self) -> float:
        """Padding over the elements of the group's tensors."""
        return self.padding / self.total if self.total else 0.0


@dataclass(frozen=True)
class Point:
    """A model planned at one world size and one granularity.

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
        """The group with the largest share of padding; of equals the first."""
        return max(self.groups, key=lambda group: group.padding_ratio)


def sweep(
    model: Model, world_sizes: Sequence[int], rows: Sequence[int], settings: Settings
) -> tuple[Point, ...]:
    """Plans every group of a model for every granularity and world size, in that nesting.

    Groups whose tensors have the same shapes and blocks, as the layers of a transformer do, are
    planned once per point.

    Args:
        model: The model.
        world_sizes: Sizes of the FSDP group.
        rows: Rows per block.
        settings: What stays the same.

    Raises:
        ValueError: A number of rows is below 1, or a world size, the alignment or the order is
            not what ``plan_layout`` takes.
    """
    points = []
    for count in rows:
        _check_rows(count)
        specs = [specs_of(group, count, settings.target) for group in model.groups]
        twins = _twins(specs)
        for world_size in world_sizes:
            plans = _plans(model, specs, twins, world_size, settings)
            points.append(Point(world_size, count, plans))
    return tuple(points)


def plan_group(model: Model, name: str, point: Point, settings: Settings) -> Layout:
    """The layout of one group at a point of a sweep.

    Raises:
        ValueError: As ``sweep`` does, or no group has this name.
    """
    (group,) = model.only(name).groups
    specs = specs_of(group, point.rows, settings.target)
    return _plan(specs, point.world_size, settings)


def _plan(specs: tuple[TensorSpec, ...], world_size: int, settings: Settings) -> Layout:
    return plan_layout(specs, world_size, alignment=settings.alignment, order=settings.order)


def _plans(
    model: Model,
    specs: Sequence[tuple[TensorSpec, ...]],
    twins: Sequence[int],
    world_size: int,
    settings: Settings,
) -> tuple[GroupPlan, ...]:
    alike = Counter(twins)
    layouts = {first: _plan(specs[first], world_size, settings) for first in alike}
    return tuple(
        GroupPlan(
            name=group.name,
            total=layouts[first].total,
            shard_size=layouts[first].shard_size,
            padding=layouts[first].padding,
            proved_lower_bound=layouts[first].proved_lower_bound,
            exact=layouts[first].exact,
            alike=alike[first],
        )
        for group, first in zip(model.groups, twins, strict=True)
    )


def _twins(specs: Sequence[tuple[TensorSpec, ...]]) -> list[int]:
    """For each group the place of the first with the same shapes and blocks; names do not count."""
    firsts: dict[tuple[tuple[tuple[int, ...] | None, int], ...], int] = {}
    return [
        firsts.setdefault(tuple((spec.shape, spec.block) for spec in group), place)
        for place, group in enumerate(specs)
    ]


def _check_rows(count: int) -> None:
    if count < 1:
        raise ValueError(f"rows is {count}; a block needs at least 1 row")
