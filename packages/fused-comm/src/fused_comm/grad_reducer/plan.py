"""Agrees on what is reduced: the parameters, their group, and what each new gradient needs.

Plans are made when gradients are seen for the first time, and are the same on all ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fused_comm.agreement import check_agreement, gather_objects, ranks_differ
from fused_comm.bucket import BucketItem, Route, route_of
from fused_comm.grad_reducer.gradient import GradientState
from fused_comm.narrow_sums import SendDtype
from fused_comm.process_groups import FlatGroup, group_of_ranks
from fused_comm.reduction import Reduction, ReductionSpec, reduction_from_spec
from fused_comm.sharding import local_tensor

__all__ = [
    "ReducerOptions", "agree_on_group", "agree_on_reductions", "bucket_item", "gradient_states",
]  # fmt: skip


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are reduced; the arguments of `GradReducer` that plans depend on.

    Attributes:
        bucket_bytes: the most bytes of a bucket.
        reduce_dtype: as in `GradReducer`.
        accumulate_dtype: as in `GradReducer`.
        fuse_axes: as in `GradReducer`.
        op: as in `GradReducer`.
        plain_group: over which the gradients of plain tensors are reduced.
        timeout: as in `GradReducer`.
        send_dtype: as in `GradReducer`.
    """

    bucket_bytes: int
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    fuse_axes: bool
    op: Literal["sum", "avg"] | None
    plain_group: FlatGroup | None
    timeout: datetime.timedelta | None
    send_dtype: SendDtype = None


def gradient_states(
    params: Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    accumulate_dtype: torch.dtype | None,
) -> list[GradientState]:
    """Makes the state of each parameter's gradient; tied parameters have one, of the first name.

    Raises:
        ValueError: there are no parameters.
    """
    states: list[GradientState] = []
    seen: set[int] = set()
    for number, item in enumerate(params):
        name, param = item if isinstance(item, tuple) else (f"parameter {number}", item)
        if id(param) in seen:
            continue
        seen.add(id(param))
        states.append(GradientState(name, param, accumulate_dtype))
    if not states:
        raise ValueError("GradReducer: expected parameters, got none")
    return states


def agree_on_group(
    gradients: Sequence[GradientState],
    options: ReducerOptions,
) -> FlatGroup:
    """Returns the group of all ranks that take part in any of the reductions; all of them call.

    Raises:
        ValueError: on every rank, where ranks have other parameters or another order, or send
            other dtypes; a plain tensor without a plain group.
    """
    plain_group = options.plain_group
    ranks: set[int] = set() if plain_group is None else set(plain_group.ranks)
    for gradient in gradients:
        if isinstance(gradient.param, DTensor):
            ranks.update(gradient.param.device_mesh.mesh.flatten().tolist())
        elif plain_group is None:
            raise ValueError(
                f"GradReducer: {gradient.name!r} is a plain tensor: pass group=, the ranks over "
                f"which its gradient is reduced"
            )
    everyone = group_of_ranks(tuple(sorted(ranks)), options.timeout)
    sent = "" if options.send_dtype is None else f", sent in {options.send_dtype}"
    lines = [f"{_description(gradient)}{sent}" for gradient in gradients]
    check_agreement("GradReducer", lines, everyone.group, local_tensor(gradients[0].param).device)
    return everyone


def agree_on_reductions(
    gradients: Sequence[GradientState],
    numbers: Sequence[int],
    order: Iterable[int],
    everyone: FlatGroup,
) -> dict[int, Reduction]:
    """Returns what the gradients need that any rank has.

    Args:
        gradients: all of the reducer's.
        numbers: those that are not known yet, ascending.
        order: the numbers in the order in which this rank's backward computed them.
        everyone: the group of all ranks that have these parameters; all of them have to call.

    Returns:
        The reductions by number, in the order in which the gradients are computed; the same on all
        ranks.

    Raises:
        ValueError: on every rank, where two ranks have a gradient that needs different reductions.
    """
    own = {
        number: reduction
        for number in numbers
        if (reduction := gradients[number].reduction()) is not None
    }
    order = [number for number in order if number in own]
    order += [number for number in reversed(numbers) if number in own and number not in set(order)]
    lines = [f"{gradients[number].name}: {own.get(number, 'none')}" for number in numbers]
    device = local_tensor(gradients[0].param).device
    if ranks_differ([*lines, str(order)], everyone.group, device):
        specs = {number: own[number].spec for number in order}
        merged = _merged(gradients, gather_objects(specs, everyone.group), everyone)
        order = list(merged)
        for number in order:
            if number not in own:
                own[number] = reduction_from_spec(gradients[number].param, merged[number])
    return {number: own[number] for number in order}


def bucket_item(number: int, reduction: Reduction, options: ReducerOptions) -> BucketItem:
    """Makes the bucket item of a gradient, and the groups of its route: all ranks have to call."""
    dtype = options.reduce_dtype or options.accumulate_dtype or reduction.dtype
    # For plain tensors DistributedDataParallel's mean; for a DTensor its Partial decides.
    op = options.op or ("avg" if reduction.mesh is None else "sum")
    averaged = reduction.averaged or op == "avg"
    if reduction.mesh is not None:
        route = route_of(
            reduction, dtype, averaged, options.fuse_axes, options.timeout, options.send_dtype
        )
    else:
        assert options.plain_group is not None  # agree_on_group has checked it
        # A plain group has no axes: a dtype by axis is not for it.
        send = options.send_dtype
        sent = () if send is None or isinstance(send, Mapping) else (send,)
        route = Route((), (options.plain_group,), dtype, reduction.device, averaged, sent)
    return BucketItem(number, reduction, route)


def _description(gradient: GradientState) -> str:
    """Describes a parameter equally on all ranks, each of which may have its own submesh."""
    param = gradient.param
    placed = "a plain tensor"
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        placed = f"{param.placements} on a mesh of {tuple(mesh.shape)} {mesh.mesh_dim_names}"
    return f"{gradient.name!r}, {tuple(param.shape)}, {param.dtype}, {placed}"


def _merged(
    gradients: Sequence[GradientState],
    by_rank: Sequence[dict[int, ReductionSpec]],
    everyone: FlatGroup,
) -> dict[int, ReductionSpec]:
    """Merges the ranks' specs; each dict is in the order in which gradients are computed."""
    ranks = dist.get_process_group_ranks(everyone.group)
    merged: dict[int, ReductionSpec] = {}
    first_rank: dict[int, int] = {}
    for rank, specs in zip(ranks, by_rank, strict=True):
        for number, spec in specs.items():
            if merged.setdefault(number, spec) != spec:
                raise ValueError(
                    f"gradient of {gradients[number].name!r} differs between ranks: it needs "
                    f"{merged[number]} on rank {first_rank[number]} and {spec} on rank {rank}"
                )
            first_rank.setdefault(number, rank)
    return merged
