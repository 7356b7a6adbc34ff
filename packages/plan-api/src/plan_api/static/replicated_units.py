"""What Eager computes to be compared with ranks that have different numbers of units.

DTensor cannot view shards as heads of which ranks have different numbers, so in the comparison
Eager has the parameters around them replicated, and all heads on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import Schedule, SiteStep, UnevenUnits
from plan_api.lowering.model_names import is_inside
from plan_api.runtime.redistribute import Redistribution

__all__ = ["ReplicatedUnits"]


class ReplicatedUnits:
    """Replicates parameters that are sharded in uneven units.

    Args:
        uneven: of a lowered plan.
    """

    def __init__(self, uneven: Sequence[UnevenUnits]) -> None:
        self._regions = tuple(dict.fromkeys(one.region for one in uneven))
        self._axes = frozenset(one.axis for one in uneven)

    @property
    def exist(self) -> bool:
        """Whether ranks have different numbers of units anywhere."""
        return bool(self._axes)

    def is_replicated(self, path: str) -> bool:
        """Whether the outputs of a module differ, as Eager has all units on every rank."""
        return any(is_inside(path, region) for region in self._regions)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a parameter of Eager, gathered if it is sharded in units."""
        if not isinstance(tensor, DTensor) or not any(map(_has_units, tensor.placements)):
            return tensor
        gathered = tensor.detach().redistribute(placements=_without_units(tensor.placements))
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(gathered, tensor.requires_grad)
        return gathered

    def schedules(self, schedules: Mapping[str, Schedule]) -> dict[str, Schedule]:
        """Returns the schedules of parameters for Eager."""
        return {
            name: replace(
                schedule, rest=_without_units(schedule.rest), run=_without_units(schedule.run)
            )
            for name, schedule in schedules.items()
        }

    def redistribution(self, step: SiteStep, mesh: DeviceMesh, site: str) -> Redistribution:
        """Makes the transform of a step, from whatever placement Eager has along these axes."""
        moves = {
            axis: replace(move, src=None) if axis in self._axes else move
            for axis, move in step.moves.items()
        }
        return Redistribution(replace(step, moves=moves), mesh, site)


def _has_units(placement: Any) -> bool:
    return getattr(placement, "unit", 1) > 1


def _without_units(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if _has_units(one) else one for one in placements)
