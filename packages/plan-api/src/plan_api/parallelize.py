"""A plan applied to a model: its tensors become DTensors, and hooks place what passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from plan_api.eager import install_eager
from plan_api.extras import warn_of_slow_planning
from plan_api.lowering.lower import Lowered, lower
from plan_api.ops.router_loss import refuse_router_loss
from plan_api.options import Options, check_in_effect
from plan_api.patches import install_patches, uninstall_patches
from plan_api.runtime.agreement import check_agreement
from plan_api.runtime.deferred_init import made_from
from plan_api.runtime.forward_errors import install_forward_errors
from plan_api.runtime.fully_shard import apply_fully_shard, fully_sharded_names
from plan_api.runtime.gradients import Gradients
from plan_api.runtime.hooks import Fired
from plan_api.runtime.state import place_state
from plan_api.spec.axes import axis_names
from plan_api.spec.plan import Plan
from plan_api.static.check import check_static
from plan_api.static.compare import Difference
from plan_api.static.guard import Guard
from plan_api.static.install import install_static
from plan_api.static.leaves import Leaf

__all__ = ["Installed", "installed", "parallelize", "uninstall"]

_log = logging.getLogger("plan_api")


@dataclass(frozen=True, eq=False)
class Installed:
    """What `parallelize` has done to a model.

    Attributes:
        plan: as it was given.
        mode: as it was given.
        lowered: the plan, for this model.
        fired: which sites have been passed.
        gradients: what reduces them.
        extras: the optional packages in use, as chosen by ``use``.
    """

    plan: Plan
    mode: Literal["eager", "static"]
    lowered: Lowered
    fired: Fired
    gradients: Gradients
    extras: tuple[str, ...]
    _guard: Guard | None
    _handles: tuple[RemovableHandle, ...]
    _leaves: tuple[Leaf, ...]

    def check(self, *args: Any, **kwargs: Any) -> tuple[Difference, ...]:
        """Holds static mode against Eager on one batch, forward and backward; changes nothing.

        Args:
            args: of the model, on all ranks of the mesh.
            kwargs: of the model.

        Returns:
            where only bits differ, on this rank.

        Raises:
            ValueError: the model is not in static mode; or, on every rank, static mode computes
                something else than Eager.
        """
        if self._guard is None:
            raise ValueError("check() holds static mode against Eager: this model is in Eager")
        return self._guard.check(args, kwargs)

    def remove(self) -> None:
        """Removes the hooks of this model; its parameters stay DTensors, in static mode too.

        What has changed in torch for the process stays: `uninstall` restores it.
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
    """Makes a model for one device one for the plan's mesh, in place (veScale, section 4).

    Its parameters and buffers become DTensors under their names, tied ones stay tied, and hooks
    place inputs and outputs. Gradients are reduced as backward brings them, with ZeRO-1 at its end:
    through fused-comm where it is in use, otherwise one by one.

    What it changes in torch for the whole process, until `uninstall`:

    - DTensor's rules for the CPU's fused attention (``_scaled_dot_product_flash_attention_for_cpu``
      and its backward), which torch has none for;
    - DTensor's handlers of ``_log_softmax``, ``nll_loss``, ``mse_loss``, ``smooth_l1_loss``,
      ``huber_loss``, ``binary_cross_entropy``, ``soft_margin_loss`` and their backward;
    - from torch 2.14 on, DTensor's strategy for ``convolution_backward``, which is left out;
    - in static mode, a hook before and after the step of every optimizer;
    - what ``dist_rng.install()`` and ``dtensor_rules.enable()`` change, if they are in use.

    Args:
        model: unmodified.
        plan: see `Plan`.
        strict: whether an entry that overrides another is an error; otherwise it is logged.
        mode: ``"eager"``: operators run on DTensors, which know how they are placed. ``"static"``:
            they run on local tensors, and the plan says how those are placed where they are moved
            (veScale, section 6.2); parameters are DTensors to optimizers and checkpoints only.
        guard_steps: in static mode, so many of the first calls with gradients are compared
            with Eager before they run (`Installed.check`); more than rounding between them is an
            error. That takes a step of Eager, and the memory of both; 0 leaves it out; None: 1.
        src_data_rank: whose parameters all ranks get, counted along each axis of the mesh; None:
            each keeps its part of its own, without communication, for models that are the same on
            all ranks. Parameters on ``meta`` have no values to send, and those of `deferred_init`
            are the same on all ranks, or it is an error.
        bucket_mb: megabytes (2**20 bytes) of gradients that fused-comm sends together, as
            `GradReducer` has it; None: 25 where fused-comm is in use.
        use: the optional packages to use: ``"dist-rng"`` (random numbers are those of one device)
            and ``"dtensor-rules"`` (operators cost less) are switched on for the process,
            ``"fused-comm"`` reduces gradients in buckets. None: those that are installed. ``()``:
            none; a package that the script itself has switched on stays on.

    Returns:
        the model.

    Raises:
        ValueError: an option has no such value, or would have no effect (``guard_steps`` above 0
            in Eager, ``bucket_mb`` without fused-comm or without gradients to reduce), or names a
            package that is not installed; the plan does not fit the model or the mode, or it or an
            option differs between ranks (then on every rank); this rank is not of the plan's mesh;
            or the model has been parallelized already. Nothing is changed, and nothing but a
            comparison between ranks is sent before.
    """
    options = Options.checked(plan.mesh, mode, guard_steps, src_data_rank, bucket_mb, use)
    if model in _installed:
        raise ValueError(f"parallelize: this {type(model).__name__} has been parallelized already")
    if plan.mesh.get_coordinate() is None:
        raise ValueError(
            f"parallelize: rank {dist.get_rank()} is not of the plan's mesh, which has ranks "
            f"{plan.mesh.mesh.flatten().tolist()}: it would keep a model of its own; call "
            f"parallelize on these alone, if mesh.get_coordinate() is not None, or make the mesh "
            f"of all ranks"
        )
    lowered = lower(plan, model, strict=strict)
    if mode == "static":
        check_static(model, lowered, plan.mesh)
    fully = lowered.fully_sharded
    others = fully_sharded_names(model, fully, lowered.schedules, plan.mesh)
    check_in_effect(options, model, others)
    check_agreement(
        [
            f"{options} on {plan.mesh}",
            *map(str, lowered.ops),
            *map(str, plan.entries),
            *made_from(model),
        ],
        plan.mesh,
    )
    if lowered.overrides:
        _log.warning("the plan overrides itself:\n%s", _lines(lowered.overrides))
    if mode == "eager" or options.guard_steps:
        warn_of_slow_planning(plan.mesh, options.extras)
    install_patches(options.extras)
    random = "dist-rng" in options.extras
    place_state(model, plan.mesh, lowered.schedules, fully, src_data_rank, random)
    hooks = [site for site in lowered.sites if site.moment.of_activations]
    fired, guard = Fired(hooks), None
    leaves: tuple[Leaf, ...] = ()
    gradients: Gradients
    if mode == "static":
        parts = install_static(model, lowered, plan.mesh, fired, options)
        handles, gradients, guard, leaves = (
            parts.handles,
            parts.gradients,
            parts.guard,
            parts.leaves,
        )
    else:
        handles = tuple(
            install_eager(
                model, lowered.sites, lowered.schedules, lowered.indices, plan.mesh, fired
            )
        )
        apply_fully_shard(model, fully, lowered.schedules, plan.mesh)
        waits = any(schedule.waits for schedule in lowered.schedules.values())
        gradients = Gradients(model, waits, fired, options.fused_mb, others, warns=options.warns)
    handles = (
        *handles,
        *refuse_router_loss(model, lowered, mode),
        *install_forward_errors(model, lowered.sites, axis_names(plan.mesh), mode),
    )
    _installed[model] = Installed(
        plan, mode, lowered, fired, gradients, options.extras, guard, handles, leaves
    )
    return model


def uninstall() -> None:
    """Restores everything that `parallelize` has changed in torch for this process.

    The inverse of its list of patches: packages that `parallelize` has switched on are switched
    off; those that were on before stay on. Models that are still parallelized would compute other
    numbers without these rules, so their hooks are removed too (`Installed.remove`): their
    parameters stay DTensors, and a call with plain tensors is an error. A later `parallelize`
    installs everything again. A second call does nothing.
    """
    for one in list(_installed.values()):
        one.remove()
    uninstall_patches()


def installed(model: nn.Module) -> Installed:
    """What `parallelize` has done to this model.

    Raises:
        ValueError: nothing.
    """
    if model not in _installed:
        raise ValueError(f"this {type(model).__name__} was not parallelized")
    return _installed[model]


def _lines(things: Iterable[object]) -> str:
    return "\n".join(map(str, things))
