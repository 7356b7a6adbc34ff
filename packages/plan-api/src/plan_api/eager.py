"""Installs the hooks of a model whose operators run on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.attention import (
    attention_calls,
    check_attention_is_called,
    install_context_parallel,
)
from plan_api.context_parallel.reorder import SequenceReorder, install_label_shifts
from plan_api.lowering.ir import ExpertIndices, OpKind, Schedule, Site, SiteStep
from plan_api.ops.local_region import install_regions
from plan_api.ops.router_loss import install_router_loss
from plan_api.runtime.hooks import SiteCoverage, TensorTransform, install_site_hook
from plan_api.runtime.redistribute import Redistribution
from plan_api.runtime.state import use_unsharded_params

__all__ = ["install_eager"]


def install_eager(
    model: nn.Module,
    sites: Iterable[Site],
    schedules: Mapping[str, Schedule],
    indices: Mapping[str, Sequence[ExpertIndices]],
    mesh: DeviceMesh,
    coverage: SiteCoverage,
    redistribution: Callable[[SiteStep, DeviceMesh, str], Redistribution] = Redistribution,
) -> Iterator[RemovableHandle]:
    """Installs hooks that redistribute DTensors.

    Args:
        model: its parameters and buffers are DTensors.
        sites: of the plan.
        schedules: of parameters and buffers, by their first name.
        indices: arguments that index into sharded parameters, by the path of their module.
        mesh: of the plan.
        coverage: records which sites run.
        redistribution: makes the transform of a step, as `Redistribution` does.
    """
    sites = list(sites)
    hooked = [site for site in sites if site.hook_point.is_module_hook]
    for site in hooked:
        transforms: list[tuple[int | str, TensorTransform]] = [
            (
                step.index,
                SequenceReorder(step, mesh, site)
                if step.kind is OpKind.ORDER
                else redistribution(step, mesh, site.name),
            )
            for step in site.moved
        ]
        yield install_site_hook(site, model.get_submodule(site.path), transforms, coverage)
    yield from use_unsharded_params(model, schedules)
    yield from install_regions(model, sites, mesh, indices)
    attention = attention_calls(hooked, mesh)
    yield from install_context_parallel(model, attention)
    yield from check_attention_is_called(model, attention)
    yield from install_label_shifts(model, hooked)
    yield from install_router_loss(model, hooked, indices, mesh, "eager")
