"""Applies a plan to a model: its tensors become DTensors, and hooks redistribute activations."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
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
from plan_api.lowering.validate import check_buckets
from plan_api.ops.router_loss import refuse_router_loss
from plan_api.options import ParallelizeOptions, warn_of_slow_planning
from plan_api.patches import install_patches, uninstall_patches
from plan_api.plan import Plan
from plan_api.runtime.agreement import check_agreement
from plan_api.runtime.deferred_init import seed_descriptions
from plan_api.runtime.forward_errors import install_forward_errors
from plan_api.runtime.fully_shard import apply_fully_shard
from plan_api.runtime.gradients import GradientReduction
from plan_api.runtime.hooks import SiteCoverage
from plan_api.runtime.state import check_device, place_state
from plan_api.static.comparison import Difference
from plan_api.static.guard import Guard
from plan_api.static.install import install_static
from plan_api.static.local_params import GradientLeaf
from plan_api.static.redistribute import SiteTypes
from plan_api.static.validate import validate_static

__all__ = ["Installed", "installed", "parallelize", "uninstall"]

_log = logging.getLogger("plan_api")


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
    """

    plan: Plan
    mode: Literal["eager", "static"]
    lowered: Lowered
    coverage: SiteCoverage
    gradients: GradientReduction
    extras: tuple[str, ...]
    _guard: Guard | None
    _handles: tuple[RemovableHandle, ...]
    _leaves: tuple[GradientLeaf, ...]

    def check(self, *args: Any, **kwargs: Any) -> tuple[Difference, ...]:
        """Validates static mode against Eager on one batch, forward and backward; changes nothing.

        Args:
            args: of the model, on all ranks of the mesh.
            kwargs: of the model.

        Returns:
            the differences within rounding, on this rank.

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

        fully_shard stays applied: in static mode its modules still compute with plain tensors.
        Patches of torch stay: `uninstall` removes them.
        """
        for handle in self._handles:
            handle.remove()
        self.gradients.remove()
        for leaf in self._leaves:
            leaf.remove()


_installed: weakref.WeakKeyDictionary[nn.Module, Installed] = weakref.WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    strict: bool = False,
    mode: Literal["eager", "static"] = "eager",
    guard_steps: int | None = None,
    src_data_rank: int | None = 0,
    bucket_mb: float | None = None,
    use: Sequence[str] | None = None,
) -> nn.Module:
    """Parallelizes a model for one device on the plan's mesh, in place (veScale, section 4).

    Its parameters and buffers become DTensors under their names, tied ones stay tied, and hooks
    redistribute inputs and outputs. Gradients are reduced when backward has accumulated them, with
    ZeRO-1 at its end: in buckets of fused-comm if it is in use, otherwise one by one.

    It patches torch for the whole process, until `uninstall`:

    - DTensor's strategies for fused attention on CPU
      (``_scaled_dot_product_flash_attention_for_cpu`` and its backward), for which torch has none;
    - ``torch.nn.functional.scaled_dot_product_attention``, which runs on the local tensors of
      DTensors where it has a mask or dropout, or torch's math backend computes it;
    - ``batch_norm``, ``group_norm``, ``cross_entropy`` with label smoothing, and ``mse_loss`` and
      ``l1_loss`` with weights, of ``torch.nn.functional``, which do so for shards;
    - DTensor's handlers of ``_log_softmax``, ``nll_loss``, ``mse_loss``, ``smooth_l1_loss``,
      ``huber_loss``, ``binary_cross_entropy``, ``soft_margin_loss`` and their backward;
    - from torch 2.14 on, DTensor's strategy for ``convolution_backward``, which is removed;
    - in static mode, a hook before and after the step of every optimizer, and the functions of
      ``torch.nn.init``, which take the parameter where they get a module's local tensor;
    - the patches of ``dist_rng.install()`` and ``dtensor_rules.enable()``, if they are in use.

    Args:
        model: unmodified.
        plan: see `Plan`.
        strict: whether an entry that overrides another is an error; otherwise it is logged.
        mode: ``"eager"``: operators run on DTensors, which have placements. ``"static"``: they run
            on local tensors, and the plan has the placements where these are redistributed
            (veScale, section 6.2); parameters are DTensors to optimizers and checkpoints only.
        guard_steps: in static mode, the number of first calls with gradients that are validated
            against Eager before they run (`Installed.check`); differences above rounding are an
            error. Each takes a step of Eager, and the memory of both modes; with fully_shard also
            that of all unsharded parameters and their gradients; None: 1.
        src_data_rank: the rank along each axis of the mesh whose parameters all ranks get; None:
            each rank shards its own, without communication, for models that are the same on all
            ranks. Parameters on ``meta`` have no values to send, and those of `deferred_init` have
            to be the same on all ranks.
        bucket_mb: megabytes (2**20 bytes) of a bucket of gradients, as `GradReducer` of fused-comm
            takes it; None: 25 if fused-comm is in use.
        use: the optional packages to use: ``"dist-rng"`` (random numbers are those of one device)
            and ``"dtensor-rules"`` (operators cost less) are enabled for the process,
            ``"fused-comm"`` reduces gradients in buckets. None: those that are installed. ``()``:
            none; a package that the script itself has enabled stays enabled.

    Returns:
        the model.

    Raises:
        ValueError: an option has no such value, or would have no effect (``guard_steps`` above 0
            in Eager, ``bucket_mb`` without fused-comm or without gradients to reduce), or names a
            package that is not installed; the plan does not fit the model or the mode, or it or an
            option differs between ranks (then on every rank); this rank is not in the plan's mesh;
            or the model has been parallelized already. Before that nothing is changed, and only a
            comparison between ranks is communicated.
    """
    options = ParallelizeOptions.checked(
        plan.mesh, mode, guard_steps, src_data_rank, bucket_mb, use
    )
    overrides = apply_plan(model, plan, options, strict=strict).overrides
    if overrides:
        text = "\n".join(map(str, overrides))
        _log.warning("entries of the plan override others:\n%s", text)
    return model


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
    lowered = lower(plan, model, strict=strict)
    reduced_by_fsdp = names_reduced_by_fsdp(
        model, lowered.fully_sharded, lowered.schedules, plan.mesh
    )
    if options.mode == "static":
        validate_static(model, lowered, plan.mesh)
    check_buckets(options.bucket_mb, model, reduced_by_fsdp)
    check_agreement(
        [
            f"{options} on {plan.mesh}",
            *map(str, lowered.ops),
            *map(str, plan.entries),
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
    _installed[model] = _install(model, plan, lowered, options, reduced_by_fsdp, types)
    return lowered


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
    types: SiteTypes | None,
) -> Installed:
    """Installs the hooks of a model whose parameters and buffers are placed."""
    mesh, schedules = plan.mesh, lowered.schedules
    coverage = SiteCoverage([site for site in lowered.sites if site.hook_point.is_module_hook])
    handles: tuple[RemovableHandle, ...]
    gradients: GradientReduction
    guard: Guard | None = None
    leaves: tuple[GradientLeaf, ...] = ()
    mode: Literal["eager", "static"] = "eager"
    if options.mode == "static":
        mode = "static"
        parts = install_static(model, lowered, mesh, coverage, options, reduced_by_fsdp, types)
        handles, gradients, guard = parts.handles, parts.gradients, parts.guard
        leaves = parts.leaves
    else:
        handles = tuple(
            install_eager(model, lowered.sites, schedules, lowered.indices, mesh, coverage)
        )
        apply_fully_shard(model, lowered.fully_sharded, schedules, mesh)
        gradients = GradientReduction(
            model,
            any(schedule.reduces_at_end for schedule in schedules.values()),
            coverage,
            options.fused_mb,
            reduced_by_fsdp,
            warns=options.warns,
        )
    handles = (
        *handles,
        *refuse_router_loss(model, lowered, mode),
        *install_forward_errors(model, lowered.sites, plan.axes, mode),
    )
    return Installed(
        plan, mode, lowered, coverage, gradients, options.extras, guard, handles, leaves
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
