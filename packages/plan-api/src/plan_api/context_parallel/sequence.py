"""Sequences that a model is given, put into the order in which ranks have them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.order import Order
from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.lowering.model_names import argument_slot, positional_names
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement

__all__ = ["Reorder", "install_shifts"]

IGNORED = -100  # the label of no token: ignore_index of cross entropy


class Reorder:
    """Puts a tensor's sequence into the order of an axis; what a module returns, out of it.

    A tensor that all ranks of the axis have whole is put in order without communication; of what
    leaves cut, each rank's chunks go to where a contiguous cut has them, by one all-to-all.

    Args:
        step: of a site.
        mesh: the plan's.
        site: which is an input's or an output's.
    """

    def __init__(self, step: SiteStep, mesh: DeviceMesh, site: Site) -> None:
        ((name, move),) = step.moves.items()
        self._step, self._mesh, self._name = step, mesh, name
        self._axis = axis_names(mesh).index(name)
        self._dim: int = getattr(move.dst, "dim", 0)
        self._order = Order(dict(move.options)["order"], mesh.size(self._axis))
        self._leaves = site.hook_point is HookPoint.FORWARD
        self._what = f"{site.name}:{step.tensor}:{step.index}"
        self._in_backward = StepContext(f"the backward of {site.name}", step)
        self.settled: DTensorSpec | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, in order.

        Raises:
            ValueError: its length cannot be cut so, or it is not placed as such a tensor is.
        """
        if tensor.ndim <= self._dim:
            raise ValueError(f"{self._what} has shape {tuple(tensor.shape)}: no dim {self._dim}")
        self._order.check(tensor.shape[self._dim], self._what)
        if not isinstance(tensor, DTensor):
            return self._whole(tensor)
        along = tensor.placements[self._axis]
        if along == Replicate() and not any(_cuts(one, self._dim) for one in tensor.placements):
            return self._on_local(tensor, self._whole)
        if self._leaves and along == Shard(self._dim):
            with moving(self._step, tensor.placements, tensor.placements):
                return self._on_local(tensor, self._exchanged)
        raise ValueError(
            f"{self._what} is {format_placement(along)} along {self._name!r}: a sequence "
            f"enters whole, to be "
            f"put in order and cut, and leaves whole or cut"
        )

    def _on_local(self, tensor: DTensor, change: Any) -> DTensor:
        local = change(tensor.to_local(grad_placements=tensor.placements))
        return DTensor.from_local(
            local, self._mesh, tensor.placements, run_check=False, shape=tensor.shape,
            stride=tensor.stride(),
        )  # fmt: skip

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._order.name == "contiguous":
            return tensor
        positions = self._order.positions(tensor.shape[self._dim], tensor.device)
        return tensor.index_select(self._dim, positions.argsort() if self._leaves else positions)

    def _exchanged(self, local: torch.Tensor) -> torch.Tensor:
        if self._order.name == "contiguous":
            return local
        group = self._mesh.get_group(self._axis).group_name
        moved: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            local, self._dim, _owners(self._order), _in_sequence(self._order),
            self._mesh.get_local_rank(self._axis), group, self._in_backward,
        )  # fmt: skip
        return moved


def _cuts(placement: Placement, dim: int) -> bool:
    return getattr(placement, "dim", None) == dim


_Owned = tuple[tuple[int, ...], ...]  # the chunks of each rank


def _owners(order: Order) -> _Owned:
    return tuple(order.chunks_of(rank) for rank in range(order.ranks))


def _in_sequence(order: Order) -> _Owned:
    """Of a contiguous cut into as many chunks."""
    each = order.chunks // order.ranks
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(order.ranks))


class _Exchange(torch.autograd.Function):
    """Chunks sent to those that have them afterwards; gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        dim: int,
        before: _Owned,
        after: _Owned,
        rank: int,
        group: str,
        at: StepContext,
    ) -> torch.Tensor:
        ctx.at = at
        ctx.rest = (dim, after, before, rank, group)
        return _exchange(local, dim, before, after, rank, group)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _exchange(grads[0], *ctx.rest), *[None] * 6


def _exchange(
    local: torch.Tensor, dim: int, before: _Owned, after: _Owned, rank: int, group: str
) -> torch.Tensor:
    own = dict(zip(before[rank], local.chunk(len(before[rank]), dim), strict=True))
    sent = [[chunk for chunk in after[to] if chunk in own] for to in range(len(after))]
    come = [[chunk for chunk in after[rank] if chunk in before[of]] for of in range(len(before))]
    ops = torch.ops._c10d_functional
    rows = torch.stack([own[chunk] for chunks in sent for chunk in chunks])
    got = ops.wait_tensor(
        ops.all_to_all_single(rows, [len(one) for one in come], [len(one) for one in sent], group)
    )
    by_chunk = dict(zip([chunk for chunks in come for chunk in chunks], got, strict=True))
    return torch.cat([by_chunk[chunk] for chunk in after[rank]], dim)


def install_shifts(model: nn.Module, sites: Iterable[Site]) -> Iterator[RemovableHandle]:
    """Hooks of modules that are given labels, and want them shifted as well.

    A token is to be predicted from the one before it, which in a sequence that is cut another rank
    may have; so labels are shifted while they are whole.

    Args:
        model: any.
        sites: of a plan.
    """
    for site in sites:
        for step in site.steps:
            for move in step.moves.values():
                shift = dict(move.options).get("shift") if step.kind is OpKind.ORDER else None
                if shift is not None:
                    module = model.get_submodule(site.path)
                    hook = _Shift(step.index, shift, getattr(move.dst, "dim", 0), module)
                    yield module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


class _Shift:
    def __init__(self, index: int | str, shifted: str, dim: int, module: nn.Module) -> None:
        places = positional_names(module)
        self._place, self._name = argument_slot(index, places)
        self._shifted, self._dim = shifted, dim

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = args[self._place] if self._place < len(args) else kwargs.get(self._name)
        if labels is None or kwargs.get(self._shifted) is not None:
            return None
        length = labels.shape[self._dim]
        after = labels.narrow(self._dim, 1, length - 1)
        none = labels.narrow(self._dim, 0, 1).clone().fill_(IGNORED)
        return args, {**kwargs, self._shifted: torch.cat([after, none], self._dim)}
