"""Limits how many tokens of a sequence an expert takes: weights of the others' choices are zero.

Of the tokens of a sequence that chose an expert the first ceil(factor x tokens x choices / experts)
keep it, where ``choices`` are those of a token. Sequences are GShard's groups: a token's fate
depends on the tokens before it in its sequence only, so that it is one device's however batches are
split over ranks and microbatches, without communication. Where a plan shards the tokens of routers
along the sequence, one all-gather of the numbers of choices, which the host does not wait for, adds
those of the tokens before on other ranks. Under context parallelism ranks have several ranges of
positions, each of which is counted; padding is behind all tokens, and counts for none.

Source: GShard, section 2.2 (https://arxiv.org/abs/2006.16668).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.batch import order_of
from plan_api.context_parallel.order import SequenceSharding, TokenOrder
from plan_api.lowering.ir import HookPoint, OpKind, Site
from plan_api.lowering.model_names import is_inside
from plan_api.ops.routers.tokens import check_before_parallelize, routers_of
from plan_api.spec.axes import axis_names
from plan_api.spec.plan_entries import SequenceOrder

__all__ = [
    "check_expert_capacity", "has_expert_capacity", "install_expert_capacity",
    "limit_expert_capacity",
]  # fmt: skip

_ATTRIBUTE = "_expert_capacity"


@dataclass(frozen=True)
class _Sequences:
    """The ranks that have parts of each sequence of a router's tokens.

    Attributes:
        mesh: of the plan.
        axis: along which they are.
        sharding: under context parallelism, which tokens they have; None: consecutive ones.
    """

    mesh: DeviceMesh
    axis: str
    sharding: SequenceSharding | None = None

    @property
    def rank(self) -> int:
        """This rank along the axis."""
        return self.mesh.get_local_rank(self.axis)

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Returns (ranks, ...): the tensors of all ranks, of one shape."""
        ops, group = torch.ops._c10d_functional, self.mesh.get_group(self.axis)
        gathered = ops.all_gather_into_tensor(own, group.size(), group.group_name)
        of_ranks: torch.Tensor = ops.wait_tensor(gathered).view(-1, *own.shape)
        return of_ranks


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
    capacity.handles += _install(model, factor, {})


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
        yield from _install(model, capacity.factor, _sequences(model, [*sites], mesh))


def check_expert_capacity(model: nn.Module, sites: Iterable[Site], mesh: DeviceMesh) -> None:
    """Refuses a plan of which the order of a sequence's tokens on the ranks is not known.

    Raises:
        ValueError: the plan shards the sequences that the model takes in another way than context
            parallelism, or the tokens of a router along the sequence by several axes, or its
            routers do not run on local tensors under context parallelism.
    """
    if not has_expert_capacity(model):
        return
    sites = list(sites)
    orders = _orders(sites, mesh)
    unordered = [axis for axis in _axes_of_inputs(sites, mesh) if axis not in orders]
    if unordered:
        raise ValueError(
            f"limit_expert_capacity: expected a plan that shards the model's sequences by "
            f"sequence(), got shard() of an input along {unordered[0]!r}, in an order that is not "
            f"known; use sequence()"
        )
    for path, axes in _sequence_axes(model, sites, mesh).items():
        along = [*orders, *axes]
        if len(along) > 1:
            raise ValueError(
                f"limit_expert_capacity: expected one axis that shards the sequences of {path}, "
                f"got {along}; shard the batch along the others"
            )
        if orders and not _runs_on_local_tokens(path, sites, *orders):
            raise ValueError(
                f"limit_expert_capacity: expected {path} to run on this rank's tokens along "
                f"{along[0]!r}, which shards sequences, got no entry that says so; add "
                f"local({path!r}, Shard(0), {along[0]!r})"
            )


def _axes_of_inputs(sites: Iterable[Site], mesh: DeviceMesh) -> list[str]:
    """Returns the axes along which the sequences that a model takes are sharded."""
    return [
        axis
        for site in sites
        if not site.path and site.hook_point is HookPoint.FORWARD_PRE
        for step in site.steps
        if step.kind is OpKind.REDIST
        for axis, move in step.moves.items()
        if _shards_sequence(move.dst) and mesh[axis].size() > 1
    ]


def _orders(sites: Iterable[Site], mesh: DeviceMesh) -> dict[str, SequenceOrder]:
    """Returns the order of tokens along each axis of context parallelism."""
    return {
        axis: dict(move.options)["order"]
        for site in sites
        for step in site.steps
        if step.kind in (OpKind.ORDER, OpKind.CONTEXT)
        for axis, move in step.moves.items()
        if mesh[axis].size() > 1
    }


def _runs_on_local_tokens(router: str, sites: Iterable[Site], axis: str) -> bool:
    return any(
        step.kind is OpKind.LOCAL and site.path == router and axis in step.moves
        for site in sites
        for step in site.steps
    )


def _sequences(model: nn.Module, sites: Sequence[Site], mesh: DeviceMesh) -> dict[str, _Sequences]:
    """Returns the ranks that have parts of a router's sequences, by its path."""
    if orders := _orders(sites, mesh):
        ((axis, order),) = orders.items()
        ordered = _Sequences(mesh, axis, SequenceSharding(order, mesh[axis].size()))
        return dict.fromkeys(routers_of(model), ordered)
    found = _sequence_axes(model, sites, mesh)
    return {path: _Sequences(mesh, axes[0]) for path, axes in found.items() if axes}


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
    model: nn.Module, factor: float, sequences: Mapping[str, _Sequences]
) -> Iterator[RemovableHandle]:
    for path, router in routers_of(model).items():
        hooks = _Hooks(path, factor, sequences.get(path))
        parent = model.get_submodule(path.rpartition(".")[0])
        yield parent.register_forward_pre_hook(hooks.remember, with_kwargs=True)
        yield router.register_forward_hook(hooks.drop)


class _Hooks:
    """Hooks of a router and of the module that calls it.

    Args:
        path: of the router.
        factor: of the capacity.
        sequences: the ranks that have parts of each sequence; None: each rank has its sequences
            with all of their tokens.
    """

    def __init__(self, path: str, factor: float, sequences: _Sequences | None) -> None:
        self._path, self._factor, self._sequences = path, factor, sequences
        self._shape: tuple[int, ...] = ()  # of the hidden states on this rank

    def remember(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = next(iter((*args, *kwargs.values())), None)
        if isinstance(states, DTensor):
            self._check_sequences(states)
        local = states.to_local() if isinstance(states, DTensor) else states
        self._shape = tuple(getattr(local, "shape", ()))

    def _check_sequences(self, states: DTensor) -> None:
        """Refuses sequences that are sharded otherwise than by context parallelism."""
        sequences = self._sequences
        ordered = [sequences.axis] if sequences is not None and sequences.sharding else []
        axes = zip(axis_names(states.device_mesh), states.placements, strict=True)
        if [axis for axis, one in axes if _shards_sequence(one)] != ordered:
            where = f"sharded along {ordered[0]!r} only" if ordered else "on one rank"
            raise ValueError(
                f"{self._path}: expected hidden states whose sequences are {where}, got "
                f"{states._spec}; run the module that takes them by Plan.local(..., Shard(1)), or "
                f"leave limit_expert_capacity out"
            )

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
        sequences = self._sequences
        number: int | torch.Tensor  # of the tokens of a sequence
        if sequences is None:
            before, number = _before(chosen), tokens
        elif sequences.sharding is None:
            earlier, number = _consecutive(chosen, sequences)
            before = _before(chosen) + earlier.unsqueeze(1)
        else:
            length = tokens * sequences.sharding.ranks
            order = order_of(sequences.sharding, length, f"{self._path}: hidden states")
            before, number = _before_in_order(chosen, order, sequences), order.length
        limit = self._factor * number * index.shape[1] / experts
        limit = limit.ceil() if isinstance(limit, torch.Tensor) else math.ceil(limit)
        return before.view(-1, experts).gather(1, index) < limit


def _before(chosen: torch.Tensor) -> torch.Tensor:
    """Returns (batch, tokens, experts), int32: how many tokens before each one chose an expert.

    Args:
        chosen: (batch, tokens, experts), int32: whether a token chose an expert.
    """
    return chosen.cumsum(1, dtype=torch.int32) - chosen


def _consecutive(chosen: torch.Tensor, sequences: _Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the choices (batch, experts) on the ranks before, and the tokens of a sequence.

    Args:
        chosen: (batch, tokens, experts), int32; ranks may have different numbers of tokens.
        sequences: whose parts are consecutive.
    """
    counts = chosen.sum(1, dtype=torch.int32)
    own = torch.cat([counts, counts.new_full((len(counts), 1), chosen.shape[1])], 1)
    of_ranks = sequences.gathered(own)
    return of_ranks[: sequences.rank].sum(0)[:, :-1], of_ranks[:, 0, -1].sum().double()


def _before_in_order(
    chosen: torch.Tensor, order: TokenOrder, sequences: _Sequences
) -> torch.Tensor:
    """Returns what `_before` does, of tokens in an order of context parallelism."""
    own = order.parts[sequences.rank]
    ranges = chosen.split([stop - start for start, stop in own], 1)
    most = max(map(len, order.parts))  # ranges of a rank
    counts = chosen.new_zeros(most, chosen.shape[0], chosen.shape[2])
    counts[: len(ranges)] = torch.stack([one.sum(1, dtype=torch.int32) for one in ranges])
    places = sorted(
        (start, rank * most + number)
        for rank, part in enumerate(order.parts)
        for number, (start, _) in enumerate(part)
    )
    places_in_order = torch.tensor([place for _, place in places], device=chosen.device)
    of_ranges = sequences.gathered(counts).flatten(0, 1).index_select(0, places_in_order)
    earlier = of_ranges.cumsum(0, dtype=torch.int32) - of_ranges
    starts = [start for start, _ in places]
    parts = [
        _before(one) + earlier[starts.index(start)].unsqueeze(1)
        for one, (start, _) in zip(ranges, own, strict=True)
    ]
    return torch.cat(parts, 1)
