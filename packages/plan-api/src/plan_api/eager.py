"""Installs the hooks of a model whose operators run on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.attention import (
    attention_calls,
    check_attention_is_called,
    install_context_parallel,
)
from plan_api.context_parallel.reorder import SequenceReorder, install_label_shifts
from plan_api.lowering.ir import ExpertIndices, HookPoint, OpKind, Schedule, Site, SiteStep
from plan_api.ops.local_region import install_regions
from plan_api.ops.low_precision.tokens import TokenGather
from plan_api.ops.overlap import OverlappedSites
from plan_api.ops.routers.auxiliary_loss import install_router_loss
from plan_api.ops.routers.capacity import install_expert_capacity
from plan_api.ops.routers.z_loss import install_router_z_loss
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
    overlapped: OverlappedSites | None = None,
    gathers: Mapping[tuple[str, int | str], TokenGather] = MappingProxyType({}),
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
        overlapped: the sites that communicate beside products; None: none.
        gathers: the inputs of modules that are gathered in float8, by path and argument.
    """
    sites = list(sites)
    hooked = [site for site in sites if site.hook_point.is_module_hook]
    for site in hooked:
        transforms: list[tuple[int | str, TensorTransform]] = [
            (
                step.index,
                SequenceReorder(step, mesh, site)
                if step.kind is OpKind.ORDER
                else _redistribution(
                    site, step, redistribution(step, mesh, site.name), overlapped, gathers
                ),
            )
            for step in site.moved
        ]
        yield install_site_hook(site, model.get_submodule(site.path), transforms, coverage)
    if overlapped is not None:
        yield from overlapped.install()
    yield from use_unsharded_params(model, schedules)
    yield from install_regions(model, sites, mesh, indices)
    attention = attention_calls(hooked, mesh)
    yield from install_context_parallel(model, attention)
    yield from check_attention_is_called(model, attention)
    yield from install_label_shifts(model, hooked)
    yield from install_router_loss(model, hooked, indices, mesh, "eager")
    yield from install_router_z_loss(model, hooked, indices, mesh, "eager")
    yield from install_expert_capacity(model, sites, mesh)


def _redistribution(
    site: Site,
    step: SiteStep,
    unsplit: Redistribution,
    overlapped: OverlappedSites | None,
    gathers: Mapping[tuple[str, int | str], TokenGather],
) -> TensorTransform:
    if site.hook_point is HookPoint.FORWARD_PRE:
        unsplit.gather = gathers.get((site.path, step.index))
    return unsplit if overlapped is None else overlapped.transform(site, step, unsplit)
