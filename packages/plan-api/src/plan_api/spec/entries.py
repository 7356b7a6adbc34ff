"""What a plan keeps, and how a call on it becomes an entry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.arguments import Axes, Placements, per_axis
from plan_api.spec.axes import axes_of, axis_names
from plan_api.spec.entry import Entry
from plan_api.spec.path import parse
from plan_api.spec.phase import Phase
from plan_api.spec.source_location import line_of_call
from plan_api.spec.verb import Verb

__all__ = ["Entries"]

_UNPLACED = (Verb.EAGER, Verb.FULLY_SHARD)  # of modules, with all that is in them


class Entries:
    """All calls on a plan, in their order.

    Args:
        mesh: the plan's.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.axes = axis_names(mesh)
        self._entries: list[Entry] = []

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All calls, in their order."""
        return tuple(self._entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self._entries))

    def _add(
        self,
        verb: Verb,
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
        what = f"{verb.value}({path!r})"
        parsed = parse(path, verb.of_modules)
        axes = axes_of(mesh, self.mesh, what)
        placed = () if verb in _UNPLACED else per_axis(dst, axes, what)

        def or_none(placements: Placements | None) -> tuple[Placement, ...] | None:
            return None if placements is None else per_axis(placements, axes, what)

        self._entries.append(
            Entry(
                verb,
                parsed,
                axes,
                placed,
                or_none(src),
                or_none(grad_dst),
                or_none(grad_src),
                phase,
                line_of_call(),
                tuple(options.items()),
            )
        )
        return self
