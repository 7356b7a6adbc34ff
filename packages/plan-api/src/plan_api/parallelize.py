"""A plan applied to a model: its tensors become DTensors, and hooks place what passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from plan_api.agree import check_agreement
from plan_api.attention import register_cpu_attention
from plan_api.eager import install_eager
from plan_api.entry import Entry
from plan_api.extras import use_extras
from plan_api.fully import apply_fully_shard, find_fully_shard
from plan_api.fuse import Override, Site, fuse, last_words
from plan_api.gradients import Gradients
from plan_api.hooks import Fired
from plan_api.indices import Indices, indices_of
from plan_api.ir import Op
from plan_api.losses import register_losses
from plan_api.plan import Plan
from plan_api.region import check_regions
from plan_api.resolve import fully_sharded, resolve, state_of
from plan_api.schedule import Schedule, schedules
from plan_api.state import place_state
from plan_api.static.compare import Difference
from plan_api.static.guard import Guard
from plan_api.static.install import check_static, install_static
from plan_api.units import check_units

__all__ = ["Installed", "Lowered", "installed", "lower", "parallelize"]

_log = logging.getLogger("plan_api")


@dataclass(frozen=True)
class Lowered:
    """What a plan is for one model.

    Attributes:
        ops: that hold, in the order of the plan.
        overrides: what the plan said and took back.
        sites: the operations, fused.
        schedules: of parameters and buffers that the plan names, by their first name.
        indices: arguments that count what each rank has, by the module's path.
        fully_sharded: modules that fsdp is applied to, with the entries that say so.
    """

    ops: tuple[Op, ...]
    overrides: tuple[Override, ...]
    sites: tuple[Site, ...]
    schedules: Mapping[str, Schedule]
    indices: Mapping[str, Sequence[Indices]]
    fully_sharded: Mapping[str, Entry]


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


def lower(plan: Plan, model: nn.Module, *, strict: bool = False) -> Lowered:
    """A plan resolved on a model and fused, without touching it.

    Args:
        plan: any.
        model: on any device, ``meta`` included.
        strict: whether an override is an error.

    Raises:
        ValueError: the plan does not fit the model; see the message.
        ModuleNotFoundError: it asks for fully_shard, and no package offers it.
    """
    ops, overrides = last_words(resolve(plan, model))
    if overrides and strict:
        raise ValueError("the plan overrides itself, under strict=True:\n" + _lines(overrides))
    tensors = dict(state_of(model))
    placed = schedules(tensors, ops, plan.mesh)
    if plan.cover:
        _check_cover(placed, model)
    fully = fully_sharded(plan, model)
    for entry in fully.values():
        find_fully_shard(entry)
    check_regions(ops)
    check_units(ops, plan.entries, model, tensors, placed, plan.mesh)
    indices = indices_of(ops, plan.entries, model, placed, plan.mesh)
    return Lowered(
        tuple(ops), tuple(overrides), tuple(fuse(ops)), MappingProxyType(placed),
        MappingProxyType(indices), MappingProxyType(fully),
    )  # fmt: skip


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
        check_static(model, lowered.sites, lowered.schedules, plan.mesh)
    check_agreement([f"mode={mode!r} on {plan.mesh}", *map(str, lowered.ops)], plan.mesh)
    if lowered.overrides:
        _log.warning("the plan overrides itself:\n%s", _lines(lowered.overrides))
    extras = use_extras()
    register_cpu_attention()
    register_losses()
    place_state(model, plan.mesh, lowered.schedules, src_data_rank, "dist-rng" in extras)
    hooks = [site for site in lowered.sites if site.moment.of_activations]
    fired = Fired(hooks)
    if mode == "static":
        parts = install_static(
            model,
            lowered.sites,
            lowered.schedules,
            lowered.indices,
            plan.mesh,
            fired,
            bucket_mb,
            guard_steps,
        )
        handles, gradients, guard = parts.handles, parts.gradients, parts.guard
    else:
        handles = tuple(
            install_eager(
                model, lowered.sites, lowered.schedules, lowered.indices, plan.mesh, fired
            )
        )
        apply_fully_shard(model, lowered.fully_sharded, plan.mesh)
        guard = None
        waits = any(schedule.waits for schedule in lowered.schedules.values())
        gradients = Gradients(model, waits, fired, bucket_mb, tuple(lowered.fully_sharded))
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


def _check_cover(placed: Mapping[str, Schedule], model: nn.Module) -> None:
    left = [name for name, _ in model.named_parameters() if name not in placed]
    if left:
        raise ValueError(
            "the plan has to cover every parameter (cover=True), and says nothing of: "
            + ", ".join(left)
        )


def _lines(things: Iterable[object]) -> str:
    return "\n".join(map(str, things))
