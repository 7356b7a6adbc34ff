"""The entries of a plan, in their order; the methods that add them are those of subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.arguments import Axes, Placements, placements_per_axis
from plan_api.spec.axes import axis_names, resolve_axes
from plan_api.spec.entry import Entry, EntryKind, Phase
from plan_api.spec.path import parse_path
from plan_api.spec.source_location import call_location

__all__ = ["EntryList"]

_WITHOUT_PLACEMENTS = (
    EntryKind.EAGER, EntryKind.FULLY_SHARD, EntryKind.RECOMPUTE, EntryKind.COMPILE,
    EntryKind.PRECISION,
)  # fmt: skip


class EntryList:
    """The calls on a plan, in their order.

    Args:
        mesh: the mesh of all DTensors; entries choose axes of it.
        cover: whether every parameter has to be named by an entry, or `parallelize` refuses.
    """

    def __init__(self, mesh: DeviceMesh, *, cover: bool = False) -> None:
        self.mesh = mesh
        self.axes = axis_names(mesh)
        self.cover = cover
        self.of_stage = False  # whether others of its entries apply to other stages of a pipeline
        self._entries: list[Entry] = []

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All calls, in their order."""
        return tuple(self._entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self._entries))

    def under(self, prefix: str) -> Self:
        """Returns the plan of a model that has this plan's model as its submodule ``prefix``."""
        nested = type(self)(self.mesh, cover=self.cover)
        nested.of_stage = self.of_stage
        nested._entries = [entry.under(prefix) for entry in self._entries]
        return nested

    def __or__(self, other: Self) -> Self:
        """Joins two plans; where both place a tensor, the right one applies."""
        if self.mesh != other.mesh:
            raise ValueError(
                f"plans on {self.mesh} and on {other.mesh} cannot be joined: one tensor cannot be "
                f"on both; make them for one mesh, with the axes that each needs"
            )
        joined = type(self)(self.mesh, cover=self.cover or other.cover)
        joined.of_stage = self.of_stage or other.of_stage
        joined._entries = [*self._entries, *other._entries]
        return joined

    def _add(
        self,
        kind: EntryKind,
        path: str,
        mesh: Axes,
        dst: Placements | None,
        *,
        src: Placements | None = None,
        grad_src: Placements | None = None,
        grad_dst: Placements | None = None,
        phase: Phase = Phase.INIT,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Self:
        what = f"{kind.value}({path!r})"
        parsed = parse_path(path, kind.names_modules)
        axes = resolve_axes(mesh, self.mesh, what)
        placed = () if kind in _WITHOUT_PLACEMENTS else placements_per_axis(dst, axes, what)

        def or_none(placements: Placements | None) -> tuple[Placement, ...] | None:
            return None if placements is None else placements_per_axis(placements, axes, what)

        self._entries.append(
            Entry(
                kind,
                parsed,
                axes,
                placed,
                or_none(src),
                or_none(grad_dst),
                or_none(grad_src),
                phase,
                call_location(),
                tuple(options.items()),
            )
        )
        return self
