"""Installs static mode on a model whose parameters are DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.attention import (
    attention_calls,
    check_attention_is_called,
    install_context_parallel,
)
from plan_api.context_parallel.reorder import install_label_shifts
from plan_api.lowering.ir import HookPoint, Lowered, OpKind, Site, gradient_placements
from plan_api.lowering.model_names import named_state
from plan_api.lowering.overlap import Overlap
from plan_api.ops.expert_indices import install_expert_indices
from plan_api.ops.low_precision.tokens import TokenGather
from plan_api.ops.overlap import OverlappedSites
from plan_api.ops.routers.auxiliary_loss import install_router_loss
from plan_api.ops.routers.capacity import install_expert_capacity
from plan_api.ops.routers.z_loss import install_router_z_loss
from plan_api.options import ParallelizeOptions
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.gradients import GradientReduction
from plan_api.runtime.hooks import SiteCoverage, install_site_hook, register_always_called
from plan_api.runtime.local_shards import ShardSizes
from plan_api.runtime.policies.precision import token_gathers
from plan_api.static.coverage import CallCoverage
from plan_api.static.eager_fallback import install_eager_fallback
from plan_api.static.fully_shard import FullyShardedParams
from plan_api.static.gradients import LocalParamGradients
from plan_api.static.guard import Guard
from plan_api.static.local_params import (
    GradientLeaf,
    LocalParam,
    UnshardedLocalParam,
    create_local_params,
    install_unsharding,
    refresh_local_params,
)
from plan_api.static.operators import (
    install_factories,
    install_initializers,
    install_operators,
)
from plan_api.static.optimizer import restore_interrupted_steps, step_on_local_params
from plan_api.static.redistribute import SiteTypes, StaticRedistribution, static_transform
from plan_api.static.sites import static_sites

__all__ = ["InstalledStatic", "install_static"]


@dataclass(frozen=True)
class InstalledStatic:
    """What is installed on a model in static mode.

    Attributes:
        handles: of its hooks.
        gradients: what reduces its gradients.
        guard: what compares it with Eager.
        leaves: what receives the gradients of its parameters.
    """

    handles: tuple[RemovableHandle, ...]
    gradients: GradientReduction
    guard: Guard
    leaves: tuple[GradientLeaf, ...]


def install_static(
    model: nn.Module,
    lowered: Lowered,
    mesh: DeviceMesh,
    coverage: SiteCoverage,
    options: ParallelizeOptions,
    reduced_by_fsdp: frozenset[str],
    types: SiteTypes | None = None,
    overlaps: Sequence[Overlap] = (),
) -> InstalledStatic:
    """Makes modules find local parameters, and installs hooks that redistribute local tensors.

    Args:
        model: its parameters are DTensors.
        lowered: the plan, validated by `validate_static`.
        mesh: the plan's mesh.
        coverage: records the sites that are passed.
        options: of `parallelize`.
        reduced_by_fsdp: the first names of the parameters whose gradients fully_shard reduces.
        types: checks the types of tensors while modules run; None: they are not checked.
        overlaps: the sites that communicate beside products.
    """
    # Before all other hooks: those around calls of operators exclude fully_shard's own then.
    fully_sharded = FullyShardedParams(model, lowered, mesh, reduced_by_fsdp)
    schedules = lowered.schedules
    with_phases = [name for name, schedule in schedules.items() if schedule.has_phases]
    local_params = create_local_params(
        model, lowered.runs_on_dtensors, reduced_by_fsdp, with_phases
    )
    call_coverage = CallCoverage()
    sizes = _sizes_of_params(model, lowered, mesh)
    handles: list[RemovableHandle] = [*install_initializers(model, local_params)]
    for path in lowered.eager:
        handles += install_eager_fallback(
            model, path, lowered.sites, lowered.indices, mesh, coverage, sizes
        )
    sites = static_sites(model, lowered, mesh)
    gathers = token_gathers(lowered.quantized_gathers, mesh)
    handles += _install_sites(
        sites, model, mesh, coverage, call_coverage, types, sizes, overlaps, gathers
    )
    handles += install_factories(model, lowered.sites, mesh, lowered.runs_on_dtensors, types, sizes)
    for path, indices in lowered.indices.items():
        if not lowered.runs_on_dtensors(path):
            handles += install_expert_indices(model, indices, mesh, path)
    handles += _install_operators(model, sites, mesh, types, sizes)
    handles += install_label_shifts(model, sites)
    handles += _install_routers(model, sites, lowered, mesh)
    # After the hooks of sites, some of which redistribute unsharded parameters.
    unsharding = install_unsharding(model, lowered)
    unsharded = tuple(unsharding.params.values())
    handles += unsharding.handles
    gradients = LocalParamGradients(
        model, local_params, unsharding.params,
        any(schedule.reduces_at_end for schedule in schedules.values()),
        gradient_placements(lowered.sites), coverage, options.fused_mb, reduced_by_fsdp,
        warns=options.warns,
    )  # fmt: skip
    step_on_local_params(local_params)
    guard = Guard(
        model, lowered, mesh, local_params, gradients, fully_sharded, call_coverage,
        options.guard_steps, overlap=options.overlap,
    )  # fmt: skip
    # Prepended after the guard's hook, so that it runs before it.
    begin = _begin_call(local_params, unsharded, gradients, call_coverage, sizes)
    handles.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
    return InstalledStatic(
        (*handles, *guard.handles), gradients, guard, (*local_params, *unsharded)
    )


def _install_operators(
    model: nn.Module,
    sites: Sequence[Site],
    mesh: DeviceMesh,
    types: SiteTypes | None,
    sizes: ShardSizes,
) -> Iterator[RemovableHandle]:
    """Installs the replacements of operators, and of the attention of sharded sequences."""
    attention = attention_calls(sites, mesh, is_static=True)
    yield from check_attention_is_called(model, attention)
    for site in sites:
        if site.hook_point is HookPoint.OPERATOR:
            module, calls = model.get_submodule(site.path), attention.pop(site.path, None)
            yield from install_operators(site, module, mesh, types, sizes, calls)
    yield from install_context_parallel(model, attention)


def _install_routers(
    model: nn.Module, sites: Sequence[Site], lowered: Lowered, mesh: DeviceMesh
) -> Iterator[RemovableHandle]:
    """Installs the losses and the capacity of a model's routers."""
    yield from install_router_loss(model, sites, lowered.indices, mesh, "static")
    yield from install_router_z_loss(model, sites, lowered.indices, mesh, "static")
    yield from install_expert_capacity(model, lowered.sites, mesh)


def _sizes_of_params(model: nn.Module, lowered: Lowered, mesh: DeviceMesh) -> ShardSizes:
    shapes = {name: tensor.shape for name, tensor in named_state(model)}
    return ShardSizes(
        mesh, ((schedule.run, shapes[name]) for name, schedule in lowered.schedules.items())
    )


def _install_sites(
    sites: Sequence[Site],
    model: nn.Module,
    mesh: DeviceMesh,
    coverage: SiteCoverage,
    call_coverage: CallCoverage,
    types: SiteTypes | None,
    sizes: ShardSizes,
    overlaps: Sequence[Overlap],
    gathers: Mapping[tuple[str, int | str], TokenGather],
) -> Iterator[RemovableHandle]:
    """Installs the hooks of sites on parameters, inputs and outputs, and Linears beside them."""
    overlapped = OverlappedSites(overlaps, model, mesh, sizes)
    for site in sites:
        if site.hook_point is not HookPoint.OPERATOR:
            yield from _install_site(
                site, model, mesh, coverage, call_coverage, types, sizes, overlapped, gathers
            )
    yield from overlapped.install()


def _install_site(
    site: Site,
    model: nn.Module,
    mesh: DeviceMesh,
    coverage: SiteCoverage,
    call_coverage: CallCoverage,
    types: SiteTypes | None,
    sizes: ShardSizes,
    overlapped: OverlappedSites,
    gathers: Mapping[tuple[str, int | str], TokenGather],
) -> list[RemovableHandle]:
    module = model.get_submodule(site.path)
    if site.hook_point is HookPoint.RUN:
        return _redistribute_params(site, module, mesh, types, sizes)
    if not site.hook_point.is_module_hook:
        return []
    transforms = []
    for step in site.moved:
        transform = static_transform(site, step, mesh, call_coverage, types, sizes)
        if site.hook_point is HookPoint.FORWARD_PRE and isinstance(transform, StaticRedistribution):
            transform.gather = gathers.get((site.path, step.index))
        if transform is not None:
            transforms.append((step.index, overlapped.transform(site, step, transform)))
    if transforms:
        return [install_site_hook(site, module, transforms, coverage)]
    coverage.record(site)
    return []


def _redistribute_params(
    site: Site, module: nn.Module, mesh: DeviceMesh, types: SiteTypes | None, sizes: ShardSizes
) -> list[RemovableHandle]:
    """Redistributes parameters while their module runs, such as a bias to Partial."""
    transforms = []
    for step in site.steps:
        if step.kind is OpKind.REDIST:
            transform = StaticRedistribution(step, mesh, site.name, sizes=sizes)
            typed = transform if types is None else types.redistributed(site, step, transform)
            transforms.append((step.tensor, StepContext(site.name, step).wrap(typed)))
    if not transforms:
        return []
    local_params: dict[str, torch.Tensor | None] = {}  # None: fully_shard's, no attribute

    def before(module: nn.Module, _: Any) -> None:
        for name, transform in transforms:
            local_params[name] = module.__dict__.get(name)
            module.__dict__[name] = transform(getattr(module, name))

    def after(module: nn.Module, _: Any, __: Any) -> None:
        for name, tensor in local_params.items():
            if tensor is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = tensor
        local_params.clear()

    return [
        module.register_forward_pre_hook(before),
        register_always_called(module, after),
    ]


def _begin_call(
    local_params: Sequence[LocalParam],
    unsharded: Sequence[UnshardedLocalParam],
    gradients: LocalParamGradients,
    call_coverage: CallCoverage,
    sizes: ShardSizes,
) -> Any:
    def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        restore_interrupted_steps()
        call_coverage.begin_call()
        sizes.begin_call(args, kwargs)
        renewed = refresh_local_params(local_params)
        for one in unsharded:
            one.refresh()
        if renewed:
            step_on_local_params(local_params)
            gradients.reset(model)
        for argument in (*args, *kwargs.values()):
            if type(argument) is not torch.Tensor:
                map_tensors(argument, _check_plain)

    return hook


def _check_plain(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"expected plain tensors as inputs of a model in static mode, got a DTensor, "
            f"{tensor._spec}; pass the tensor of one device, or use mode='eager'"
        )
    return tensor
