"""Installs a plan on a model: its tensors become DTensors, and hooks redistribute activations."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from plan_api.eager import install_eager
from plan_api.lowering.fully_shard import names_reduced_by_fsdp
from plan_api.lowering.ir import Lowered
from plan_api.lowering.lower import lower
from plan_api.lowering.overlap import Overlap, check_overlaps, find_overlaps
from plan_api.lowering.validate import check_buckets
from plan_api.ops.overlap import OverlappedSites
from plan_api.ops.routers.capacity import check_expert_capacity
from plan_api.options import ParallelizeOptions, warn_of_slow_planning
from plan_api.patches import install_patches, uninstall_patches
from plan_api.plan import Plan
from plan_api.runtime.agreement import check_agreement
from plan_api.runtime.deferred_init import seed_descriptions
from plan_api.runtime.forward_errors import install_forward_errors
from plan_api.runtime.gradients import GradientReduction
from plan_api.runtime.hooks import SiteCoverage
from plan_api.runtime.policies.compile import install_compile
from plan_api.runtime.policies.fully_shard import apply_fully_shard
from plan_api.runtime.policies.precision import (
    install_precision,
    precisions_on,
    token_gathers,
)
from plan_api.runtime.policies.recompute import install_recompute
from plan_api.runtime.state import check_device, place_state
from plan_api.static.comparison import Difference
from plan_api.static.guard import Guard
from plan_api.static.install import install_static
from plan_api.static.local_params import GradientLeaf
from plan_api.static.redistribute import SiteTypes
from plan_api.static.validate import validate_static

__all__ = ["Installed", "apply_plan", "installed", "uninstall"]


@dataclass(frozen=True, eq=False)
class Installed:
    """What `parallelize` has installed on a model.

    Attributes:
        plan: of `parallelize`.
        mode: of `parallelize`.
        lowered: the plan, lowered for this model.
        coverage: which sites have run.
        gradients: the reduction of gradients.
        extras: the optional packages in use, as chosen by ``use``.
        overlaps: the sites that communicate along the axis of ``overlap``, beside products or not.
    """

    plan: Plan
    mode: Literal["eager", "static"]
    lowered: Lowered
    coverage: SiteCoverage
    gradients: GradientReduction
    extras: tuple[str, ...]
    overlaps: tuple[Overlap, ...]
    _guard: Guard | None
    _handles: tuple[RemovableHandle, ...]
    _leaves: tuple[GradientLeaf, ...]

    def check(self, *args: Any, **kwargs: Any) -> tuple[Difference, ...]:
        """Validates static mode against Eager on one batch, forward and backward; changes nothing.

        Args:
            args: of the model, on all ranks of the mesh.
            kwargs: of the model.

        Returns:
            the differences that are no errors, on this rank: those within rounding, and collectives
            that differ in kind, number or bytes.

        Raises:
            ValueError: the model is not in static mode; or, on every rank, static mode and
                Eager differ by more than rounding.
        """
        if self._guard is None:
            raise ValueError(
                "check(): expected a model in static mode, to validate against Eager, got one in "
                "Eager"
            )
        return self._guard.check(args, kwargs)

    def remove(self) -> None:
        """Removes the hooks of this model; its parameters stay DTensors, in static mode too.

        Its modules neither recompute activations nor run compiled or in low precision any longer.

        fully_shard stays applied: in static mode its modules still compute with plain tensors.
        Patches of torch stay: `uninstall` removes them.
        """
        for handle in self._handles:
            handle.remove()
        self.gradients.remove()
        for leaf in self._leaves:
            leaf.remove()


_installed: weakref.WeakKeyDictionary[nn.Module, Installed] = weakref.WeakKeyDictionary()


def apply_plan(
    model: nn.Module,
    plan: Plan,
    options: ParallelizeOptions,
    *,
    strict: bool = False,
    types: SiteTypes | None = None,
) -> Lowered:
    """Does what `parallelize` does, and returns the plan, lowered, whose overrides are not logged.

    Args:
        model: see `parallelize`.
        plan: see `parallelize`.
        options: of `parallelize`.
        strict: see `parallelize`.
        types: in static mode, checks the types of tensors while modules run; see `typecheck`.
    """
    _check_rank_and_model(plan.mesh, model)
    lowered = lower(plan, model, strict=strict, mode=options.mode)
    reduced_by_fsdp = names_reduced_by_fsdp(
        model, lowered.fully_sharded, lowered.schedules, plan.mesh
    )
    if options.mode == "static":
        validate_static(model, lowered, plan.mesh)
    check_expert_capacity(model, lowered.sites, plan.mesh)
    check_buckets(options.bucket_mb, model, reduced_by_fsdp)
    precisions = precisions_on(plan.mesh, lowered.precisions)
    overlaps = _overlaps(lowered, model, plan.mesh, options.overlap)
    check_agreement(
        [
            f"{options} on {plan.mesh}",
            *map(str, lowered.ops),
            *map(str, plan.entries),
            *(f"{name}: {values}" for name, values in lowered.shard_values.items()),
            *seed_descriptions(model),
        ],
        plan.mesh,
    )
    # Everything is validated: from here on the model and torch are changed.
    if options.mode == "eager" or options.guard_steps:
        warn_of_slow_planning(plan.mesh, options.extras)
    install_patches(options.extras)
    random_shards = "dist-rng" in options.extras
    place_state(
        model, plan.mesh, lowered.schedules, lowered.fully_sharded, options.src_data_rank,
        random_shards,
    )  # fmt: skip
    # First: recomputation, compilation and hooks of these modules run around it.
    precision = tuple(install_precision(model, precisions, lowered.schedules, plan.mesh))
    _installed[model] = _install(
        model, plan, lowered, options, reduced_by_fsdp, precision, types, overlaps
    )
    return lowered


def _overlaps(
    lowered: Lowered, model: nn.Module, mesh: DeviceMesh, axis: str | None
) -> tuple[Overlap, ...]:
    """Returns the sites that communicate along an axis, after a check that some overlap."""
    if axis is None:
        return ()
    found = find_overlaps(lowered, model, mesh, axis)
    check_overlaps(found, lowered, mesh, axis)
    return found


def _check_rank_and_model(mesh: DeviceMesh, model: nn.Module) -> None:
    if model in _installed:
        raise ValueError(f"parallelize: this {type(model).__name__} has been parallelized already")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"parallelize: expected a rank of the plan's mesh, which has ranks "
            f"{mesh.mesh.flatten().tolist()}, got rank {dist.get_rank()}; call parallelize only "
            f"where mesh.get_coordinate() is not None, or make the mesh of all ranks"
        )
    check_device(mesh, model)


def _install(
    model: nn.Module,
    plan: Plan,
    lowered: Lowered,
    options: ParallelizeOptions,
    reduced_by_fsdp: frozenset[str],
    precision: tuple[RemovableHandle, ...],
    types: SiteTypes | None,
    overlaps: tuple[Overlap, ...],
) -> Installed:
    """Installs the hooks of a model whose parameters and buffers are placed."""
    mesh, schedules = plan.mesh, lowered.schedules
    coverage = SiteCoverage([site for site in lowered.sites if site.hook_point.is_module_hook])
    # First: hooks of these modules run around it.
    recompute = tuple(install_recompute(model, lowered.recomputed))
    handles: tuple[RemovableHandle, ...]
    gradients: GradientReduction
    guard: Guard | None = None
    leaves: tuple[GradientLeaf, ...] = ()
    mode: Literal["eager", "static"] = "eager"
    if options.mode == "static":
        mode = "static"
        parts = install_static(
            model, lowered, mesh, coverage, options, reduced_by_fsdp, types, overlaps
        )
        handles, gradients, guard = parts.handles, parts.gradients, parts.guard
        leaves = parts.leaves
    else:
        handles = tuple(
            install_eager(
                model, lowered.sites, schedules, lowered.indices, mesh, coverage,
                overlapped=OverlappedSites(overlaps, model, mesh),
                gathers=token_gathers(lowered.quantized_gathers, mesh),
            )
        )  # fmt: skip
        apply_fully_shard(model, lowered.fully_sharded, schedules, lowered.shard_values, mesh)
        gradients = GradientReduction(
            model,
            any(schedule.reduces_at_end for schedule in schedules.values()),
            coverage,
            options.fused_mb,
            reduced_by_fsdp,
            warns=options.warns,
        )
    handles = (
        *install_compile(model, lowered.compiled, lowered.recomputed, coverage),  # removed first
        *handles,
        *install_forward_errors(model, lowered.sites, plan.axes, mode),
        *recompute,
        *precision,
    )
    return Installed(
        plan, mode, lowered, coverage, gradients, options.extras, overlaps, guard, handles, leaves
    )


def uninstall() -> None:
    """Removes all patches of torch that `parallelize` has installed in this process.

    Packages that `parallelize` has enabled are disabled; those that were enabled before stay
    enabled. Models that are still parallelized would compute other results without the patches, so
    their hooks are removed too (`Installed.remove`): their parameters stay DTensors, and a call
    with plain tensors is an error. A later `parallelize` installs everything again. A second call
    does nothing.
    """
    for of_model in list(_installed.values()):
        of_model.remove()
    uninstall_patches()


def installed(model: nn.Module) -> Installed:
    """Returns what `parallelize` has installed on a model.

    Raises:
        ValueError: the model has not been parallelized.
    """
    if model not in _installed:
        raise ValueError(
            f"this {type(model).__name__} was not parallelized: call parallelize() first"
        )
    return _installed[model]
