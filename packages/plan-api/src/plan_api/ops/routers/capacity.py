"""Limits how many tokens of a sequence an expert takes: weights of the others' choices are zero.

Of the tokens of a sequence that chose an expert the first ceil(factor x tokens x choices / experts)
keep it, where ``choices`` are those of a token. Sequences are GShard's groups: a token's fate
depends on the tokens before it in its sequence only, so that it is one device's however batches are
split over ranks and microbatches, without communication. Where a plan shards the tokens of routers
along the sequence, one all-gather of the numbers of choices, which the host does not wait for, adds
those of the ranks before.

Source: GShard, section 2.2 (https://arxiv.org/abs/2006.16668).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.lowering.model_names import is_inside
from plan_api.ops.routers.tokens import check_before_parallelize, routers_of
from plan_api.spec.axes import axis_names

__all__ = [
    "check_expert_capacity", "has_expert_capacity", "install_expert_capacity",
    "limit_expert_capacity",
]  # fmt: skip

_ATTRIBUTE = "_expert_capacity"


@dataclass(eq=False)
class _Capacity:
    """The capacity factor of a model, and its hooks before `parallelize`."""

    factor: float
    handles: list[RemovableHandle] = field(default_factory=list)


def limit_expert_capacity(model: nn.Module, factor: float) -> None:
    """Limits how many tokens of each sequence an expert of a model takes, by hooks.

    An expert takes the first ceil(factor x tokens x choices / experts) of the tokens of a sequence
    that chose it. The weights of other choices are zero; those of a token's remaining choices stay
    as they are. Where a plan dispatches tokens, choices with a weight of zero are neither sent nor
    computed. It holds while the routers are in training mode: evaluation drops nothing.

    Args:
        model: of transformers, with routers that return logits, weights and choices (tokens,
            choices), and are called by modules that take hidden states (batch, sequence, features).
            Call this before `parallelize`, after which the same choices are dropped.
        factor: above 0; with 1 an even load is within the limit.

    Raises:
        ValueError: the factor is not a positive number, the model has no such routers, has a
            capacity already or has been parallelized.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(
            f"limit_expert_capacity: expected a factor above 0, got {factor}; give one such as "
            f"1.25, or leave the call out"
        )
    check_before_parallelize(model, "limit_expert_capacity", _ATTRIBUTE)
    capacity = _Capacity(factor)
    setattr(model, _ATTRIBUTE, capacity)
    capacity.handles += _install(model, factor, None, {})


def has_expert_capacity(model: nn.Module) -> bool:
    """Whether `limit_expert_capacity` was called with a model, or that of a shadow model."""
    return _ATTRIBUTE in vars(model)


def install_expert_capacity(
    model: nn.Module, sites: Iterable[Site], mesh: DeviceMesh
) -> Iterator[RemovableHandle]:
    """Installs hooks that drop what one device drops, if `limit_expert_capacity` was called.

    Args:
        model: any, or its shadow model.
        sites: of the plan, which `check_expert_capacity` accepts.
        mesh: of the plan.
    """
    capacity = vars(model).get(_ATTRIBUTE)
    if capacity is not None:
        for handle in capacity.handles:
            handle.remove()
        yield from _install(model, capacity.factor, mesh, _sequence_axes(model, sites, mesh))


def check_expert_capacity(model: nn.Module, sites: Iterable[Site], mesh: DeviceMesh) -> None:
    """Refuses a plan whose ranks have no consecutive parts of a sequence.

    Raises:
        ValueError: the plan has context parallelism, or shards the tokens of a router along the
            sequence by several axes.
    """
    if not has_expert_capacity(model):
        return
    sites = list(sites)
    if any(map(_shards_inputs_of_model, sites)):
        raise ValueError(
            "limit_expert_capacity: expected a plan without context parallelism, whose ranks have "
            "tokens in another order, got one with it; leave either out"
        )
    for path, axes in _sequence_axes(model, sites, mesh).items():
        if len(axes) > 1:
            raise ValueError(
                f"limit_expert_capacity: expected one axis that shards the sequences of {path}, "
                f"got {axes}; shard the batch along the others"
            )


def _shards_inputs_of_model(site: Site) -> bool:
    """Whether a site is of context parallelism, or shards the sequences that a model takes."""
    is_input = not site.path and site.hook_point is HookPoint.FORWARD_PRE
    return any(
        step.kind in (OpKind.ORDER, OpKind.CONTEXT)
        or (is_input and step.kind is OpKind.REDIST and any(map(_shards_sequence, _ends(step))))
        for step in site.steps
    )


def _ends(step: SiteStep) -> list[Placement]:
    return [move.dst for move in step.moves.values()]


def _shards_sequence(placement: Placement) -> bool:
    return getattr(placement, "dim", None) == 1


def _sequence_axes(
    model: nn.Module, sites: Iterable[Site], mesh: DeviceMesh
) -> dict[str, list[str]]:
    """Returns the axes along which routers have parts of a sequence as plain tensors, by path."""
    found: dict[str, list[str]] = {path: [] for path in routers_of(model)}
    local = [(site.path, one) for site in sites for one in site.steps if one.kind is OpKind.LOCAL]
    for path, axes in found.items():
        parent = path.rpartition(".")[0]
        for region, step in local:
            if is_inside(parent, region):
                axes += [axis for axis, move in step.moves.items() if _shards_sequence(move.dst)]
        axes[:] = [axis for axis in axis_names(mesh) if axis in axes and mesh[axis].size() > 1]
    return found


def _install(
    model: nn.Module, factor: float, mesh: DeviceMesh | None, axes: dict[str, list[str]]
) -> Iterator[RemovableHandle]:
    for path, router in routers_of(model).items():
        along = axes.get(path)
        hooks = _Hooks(path, factor, (mesh, along[0]) if mesh is not None and along else None)
        parent = model.get_submodule(path.rpartition(".")[0])
        yield parent.register_forward_pre_hook(hooks.remember, with_kwargs=True)
        yield router.register_forward_hook(hooks.drop)


class _Hooks:
    """Hooks of a router and of the module that calls it.

    Args:
        path: of the router.
        factor: of the capacity.
        sequence: mesh and axis whose ranks have consecutive parts of each sequence; None: each
            rank has its sequences with all of their tokens.
    """

    def __init__(self, path: str, factor: float, sequence: tuple[DeviceMesh, str] | None) -> None:
        self._path, self._factor, self._sequence = path, factor, sequence
        self._shape: tuple[int, ...] = ()  # of the hidden states on this rank

    def remember(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = next(iter((*args, *kwargs.values())), None)
        if isinstance(states, DTensor) and any(map(_shards_sequence, states.placements)):
            raise ValueError(
                f"{self._path}: expected hidden states whose sequences are on one rank, got "
                f"{states._spec}; run the module that takes them by Plan.local(..., Shard(1)), or "
                f"leave limit_expert_capacity out"
            )
        local = states.to_local() if isinstance(states, DTensor) else states
        self._shape = tuple(getattr(local, "shape", ()))

    def drop(self, router: nn.Module, _: Any, output: Any) -> Any:
        if not router.training:
            return None
        logits, weights, index, *others = output
        local = index.to_local() if isinstance(index, DTensor) else index
        within = self._within_limit(local, logits.shape[-1])
        if isinstance(index, DTensor):
            within = DTensor.from_local(
                within, index.device_mesh, index.placements, run_check=False,
                shape=index.shape, stride=index.stride(),
            )  # fmt: skip
        return (logits, weights * within.to(weights.dtype), index, *others)

    def _within_limit(self, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Returns which of this rank's choices (tokens, choices) experts take, as bools."""
        if len(self._shape) != 3 or self._shape[0] * self._shape[1] != len(index):
            raise ValueError(
                f"{self._path}: expected to be called with the tokens of hidden states (batch, "
                f"sequence, features), got {len(index)} tokens of {self._shape}; leave "
                f"limit_expert_capacity out"
            )
        batch, tokens, _ = self._shape
        chosen = index.new_zeros(len(index), experts, dtype=torch.int32).scatter_(1, index, 1)
        chosen = chosen.view(batch, tokens, experts)
        before = chosen.cumsum(1, dtype=torch.int32) - chosen  # of the sequence
        limit: float | torch.Tensor
        if self._sequence is None:
            limit = math.ceil(self._factor * tokens * index.shape[1] / experts)
        else:
            earlier, number = self._of_sequence(chosen.sum(1, dtype=torch.int32), tokens)
            before = before + earlier.unsqueeze(1)
            limit = (self._factor * number.double() * index.shape[1] / experts).ceil()
        return before.view(-1, experts).gather(1, index) < limit

    def _of_sequence(self, counts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the choices (batch, experts) on the ranks before, and the tokens of a sequence.

        Args:
            counts: (batch, experts) int32, of this rank.
            tokens: of a sequence on this rank; ranks may have different numbers.
        """
        assert self._sequence is not None
        mesh, axis = self._sequence
        own = torch.cat([counts, counts.new_full((len(counts), 1), tokens)], 1)
        ops, group = torch.ops._c10d_functional, mesh.get_group(axis)
        gathered = ops.all_gather_into_tensor(own, group.size(), group.group_name)
        of_ranks = ops.wait_tensor(gathered).view(-1, *own.shape)
        earlier = of_ranks[: mesh.get_local_rank(axis)].sum(0)
        return earlier[:, :-1], of_ranks[:, 0, -1].sum()
