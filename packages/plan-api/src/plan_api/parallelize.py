"""A plan applied to a model: its tensors become DTensors, and hooks place what passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.agree import check_agreement
from plan_api.attention import register_cpu_attention
from plan_api.extras import use_extras
from plan_api.fuse import Override, Site, fuse, last_words
from plan_api.gradients import Gradients
from plan_api.hooks import Fired, install
from plan_api.ir import Moment, Op
from plan_api.losses import register_losses
from plan_api.plan import Plan
from plan_api.resolve import resolve, state_of

__all__ = ["Installed", "Lowered", "installed", "lower", "parallelize"]

_log = logging.getLogger("plan_api")


@dataclass(frozen=True)
class Lowered:
    """What a plan is for one model.

    Attributes:
        ops: that hold, in the order of the plan.
        overrides: what the plan said and took back.
        sites: the operations, fused.
    """

    ops: tuple[Op, ...]
    overrides: tuple[Override, ...]
    sites: tuple[Site, ...]


@dataclass(frozen=True, eq=False)
class Installed:
    """What `parallelize` has done to a model.

    Attributes:
        lowered: the plan, for this model.
        fired: which sites have been passed.
        gradients: what reduces them.
        extras: the packages that were found and switched on.
    """

    lowered: Lowered
    fired: Fired
    gradients: Gradients
    extras: tuple[str, ...]
    _handles: tuple[RemovableHandle, ...]

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
    """
    ops, overrides = last_words(resolve(plan, model))
    if overrides and strict:
        raise ValueError("the plan overrides itself, under strict=True:\n" + _lines(overrides))
    if plan.cover:
        _check_cover(ops, model)
    return Lowered(tuple(ops), tuple(overrides), tuple(fuse(ops)))


def parallelize(
    model: nn.Module, plan: Plan, *, strict: bool = False, src_data_rank: int | None = 0
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
        src_data_rank: whose parameters all ranks get; None: each keeps its part of its own, without
            communication, for models that are the same on all ranks.

    Returns:
        the model.

    Raises:
        ValueError: the plan does not fit the model, or differs between ranks (then on every rank);
            or the model has been parallelized already. Nothing is changed, and nothing sent before.
    """
    if model in _installed:
        raise ValueError(f"parallelize: this {type(model).__name__} has been parallelized already")
    lowered = lower(plan, model, strict=strict)
    check_agreement([str(plan.mesh), *map(str, lowered.ops)], plan.mesh)
    if lowered.overrides:
        _log.warning("the plan overrides itself:\n%s", _lines(lowered.overrides))
    extras = use_extras()
    register_cpu_attention()
    register_losses()
    _place_state(model, plan, lowered.ops, src_data_rank)
    fired = Fired([site for site in lowered.sites if site.moment is not Moment.INIT])
    handles = [
        install(site, model.get_submodule(site.path), plan.mesh, fired)
        for site in lowered.sites
        if site.moment is not Moment.INIT
    ]
    gradients = Gradients(model, fired)
    _installed[model] = Installed(lowered, fired, gradients, extras, tuple(handles))
    return model


def installed(model: nn.Module) -> Installed:
    """What `parallelize` has done to this model.

    Raises:
        ValueError: nothing.
    """
    if model not in _installed:
        raise ValueError(f"this {type(model).__name__} was not parallelized")
    return _installed[model]


def _place_state(
    model: nn.Module, plan: Plan, ops: Iterable[Op], src_data_rank: int | None
) -> None:
    """Every parameter and buffer becomes a DTensor; a tied one, under all its names."""
    placements: dict[int, list[Placement]] = {}
    tensors = dict(state_of(model))
    for op in ops:
        if op.moment is Moment.INIT:
            name = f"{op.path}.{op.tensor}" if op.path else op.tensor
            placed = placements.setdefault(id(tensors[name]), [Replicate()] * plan.mesh.ndim)
            placed[plan.axes.index(op.axis)] = op.dst
    made: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            continue
        if id(tensor) not in made:
            placed = placements.get(id(tensor), [Replicate()] * plan.mesh.ndim)
            made[id(tensor)] = _placed(tensor, plan, placed, src_data_rank)
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        registry = module._parameters if own in module._parameters else module._buffers
        registry[own] = made[id(tensor)]  # type: ignore[assignment]


def _placed(
    tensor: torch.Tensor, plan: Plan, placements: list[Placement], src_data_rank: int | None
) -> torch.Tensor:
    placed = distribute_tensor(tensor.detach(), plan.mesh, placements, src_data_rank=src_data_rank)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(placed, requires_grad=tensor.requires_grad)
    return placed


def _check_cover(ops: Iterable[Op], model: nn.Module) -> None:
    known = {
        f"{op.path}.{op.tensor}" if op.path else op.tensor for op in ops if op.moment is Moment.INIT
    }
    left = [name for name, _ in model.named_parameters() if name not in known]
    if left:
        raise ValueError(
            "the plan has to cover every parameter (cover=True), and says nothing of: "
            + ", ".join(left)
        )


def _lines(things: Iterable[object]) -> str:
    return "\n".join(map(str, things))
