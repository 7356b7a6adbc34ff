"""What is done with a tensor at a site of activations, in static mode."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.runtime.hooks import TensorTransform
from plan_api.spec.axes import axis_names
from plan_api.static.mover import StaticMover
from plan_api.static.passed import Passed

__all__ = ["mover_of"]


def mover_of(
    site: Site, step: SiteStep, mesh: DeviceMesh, passed: Passed | None = None
) -> TensorTransform | None:
    """What moves a tensor of a step; None if there is nothing to do.

    Raises:
        ValueError: the step does not say what a tensor, or its gradient, is before.
    """
    at_root = not site.path
    if step.kind is OpKind.ANNOTATE:  # inside of the model nobody has to know
        return _Shown(step, mesh) if at_root and site.hook_point is HookPoint.FORWARD else None
    whole = at_root and site.hook_point is HookPoint.FORWARD_PRE
    mover = StaticMover(step, mesh, site.name, whole, passed)
    return None if mover.idle else mover


class _Shown:
    """What the model returns, annotated: the script is given the DTensor that Eager would give."""

    settled: DTensorSpec | None = None

    def __init__(self, step: SiteStep, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placements: list[Placement] = [
            step.moves[axis].dst if axis in step.moves else Replicate() for axis in axis_names(mesh)
        ]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(tensor, self._mesh, self._placements, run_check=False)
