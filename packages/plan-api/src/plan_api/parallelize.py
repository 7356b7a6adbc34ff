"""A plan applied to a model: its tensors become DTensors, and hooks place what passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from plan_api._compat import use_rule_for_convolution_backward
from plan_api.agree import check_agreement
from plan_api.attention import register_cpu_attention
from plan_api.eager import install_eager
from plan_api.extras import use_extras
from plan_api.fully import apply_fully_shard, fully_sharded_names
from plan_api.gradients import Gradients
from plan_api.hooks import Fired
from plan_api.losses import register_losses
from plan_api.lowered import Lowered, lower
from plan_api.plan import Plan
from plan_api.router_loss import refuse_router_loss
from plan_api.state import place_state
from plan_api.static.check import check_static
from plan_api.static.compare import Difference
from plan_api.static.guard import Guard
from plan_api.static.install import install_static

__all__ = ["Installed", "installed", "parallelize"]

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
        extras: the packages that were found and switched on.
    """

    plan: Plan
    mode: Literal["eager", "static"]
    lowered: Lowered
    fired: Fired
    gradients: Gradients
    extras: tuple[str, ...]
    _guard: Guard | None
    _handles: tuple[RemovableHandle, ...]

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
        """Takes the hooks from the model, whose tensors stay DTensors."""
        for handle in self._handles:
            handle.remove()
        self.gradients.remove()


_installed: weakref.WeakKeyDictionary[nn.Module, Installed] = weakref.WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    strict: bool = False,
    mode: Literal["eager", "static"] = "eager",
    guard_steps: int = 1,
    src_data_rank: int | None = 0,
    bucket_mb: float = 25.0,
) -> nn.Module:
    """Makes a model for one device one for the plan's mesh, in place (veScale, section 4).

    Its parameters and buffers become DTensors under their names, tied ones stay tied, and hooks
    place inputs and outputs. Gradients are reduced at the end of each backward: through fused-comm
    where it is installed, otherwise one by one. Where dist-rng and dtensor-rules are installed they
    are switched on, process-wide.

    Args:
        model: unmodified.
        plan: see `Plan`.
        strict: whether an entry that overrides another is an error; otherwise it is logged.
        mode: ``"eager"``: operators run on DTensors, which know how they are placed. ``"static"``:
            they run on local tensors, and the plan says how those are placed where they are moved
            (veScale, section 6.2); parameters are DTensors to optimizers and checkpoints only.
        guard_steps: in static mode, so many of the first calls with gradients are held against
            Eager before they run (`Installed.check`); more than rounding between them is an error.
            That takes a step of Eager, and the memory of both; 0 leaves it out.
        src_data_rank: whose parameters all ranks get; None: each keeps its part of its own, without
            communication, for models that are the same on all ranks.
        bucket_mb: of gradients that fused-comm sends together, as `GradReducer` has it.

    Returns:
        the model.

    Raises:
        ValueError: the plan does not fit the model, or differs between ranks (then on every rank);
            or this rank is not of the plan's mesh; or the model has been parallelized already.
            Nothing is changed, and nothing sent before.
    """
    if mode not in ("eager", "static"):
        raise ValueError(f"parallelize: mode={mode!r} must be 'eager' or 'static'")
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
    check_agreement([f"mode={mode!r} on {plan.mesh}", *map(str, lowered.ops)], plan.mesh)
    if lowered.overrides:
        _log.warning("the plan overrides itself:\n%s", _lines(lowered.overrides))
    extras = use_extras()
    register_cpu_attention()
    register_losses()
    use_rule_for_convolution_backward()
    fully, random = lowered.fully_sharded, "dist-rng" in extras
    place_state(model, plan.mesh, lowered.schedules, fully, src_data_rank, random)
    hooks = [site for site in lowered.sites if site.moment.of_activations]
    fired = Fired(hooks)
    if mode == "static":
        parts = install_static(model, lowered, plan.mesh, fired, bucket_mb, guard_steps)
        handles, gradients, guard = parts.handles, parts.gradients, parts.guard
    else:
        handles = tuple(
            install_eager(
                model, lowered.sites, lowered.schedules, lowered.indices, plan.mesh, fired
            )
        )
        others = fully_sharded_names(model, fully, lowered.schedules, plan.mesh)
        apply_fully_shard(model, fully, lowered.schedules, plan.mesh)
        guard = None
        waits = any(schedule.waits for schedule in lowered.schedules.values())
        gradients = Gradients(model, waits, fired, bucket_mb, others)
    handles = (*handles, *refuse_router_loss(model, lowered, mode))
    _installed[model] = Installed(plan, mode, lowered, fired, gradients, extras, guard, handles)
    return model


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
