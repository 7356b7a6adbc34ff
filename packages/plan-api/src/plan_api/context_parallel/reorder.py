"""Reorders sequences: inputs into the order of the ranks' chunks, outputs back; shifts labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.order import SequenceSharding
from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.lowering.model_names import argument_slot, positional_names
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement

__all__ = ["SequenceReorder", "install_label_shifts"]

IGNORE_INDEX = -100  # the default ignore_index of cross entropy


class SequenceReorder:
    """Puts a tensor's sequence into the order of an axis; an output of a module back.

    A tensor that is replicated along the axis is reordered without communication. Chunks of an
    output that is sharded are sent to the ranks of a contiguous shard, by one all-to-all.

    Args:
        step: a step of a site.
        mesh: the plan's mesh.
        site: a site on the inputs or outputs of a module.
    """

    def __init__(self, step: SiteStep, mesh: DeviceMesh, site: Site) -> None:
        ((axis, move),) = step.moves.items()
        self._step, self._mesh, self._axis_name = step, mesh, axis
        self._axis = axis_names(mesh).index(axis)
        self._dim: int = getattr(move.dst, "dim", 0)
        self._order = SequenceSharding(dict(move.options)["order"], mesh.size(self._axis))
        self._is_output = site.hook_point is HookPoint.FORWARD
        self._what = f"{site.name}:{step.tensor}:{step.index}"
        self._backward_context = StepContext(f"the backward of {site.name}", step)
        self.settled: DTensorSpec | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the reordered tensor.

        Raises:
            ValueError: its length cannot be divided among the ranks, or it is neither replicated
                nor, as an output, sharded along the axis.
        """
        if tensor.ndim <= self._dim:
            raise ValueError(
                f"{self._what}: expected a tensor with dim {self._dim}, got shape "
                f"{tuple(tensor.shape)}"
            )
        self._order.check_length(tensor.shape[self._dim], self._what)
        if not isinstance(tensor, DTensor):
            return self._permute(tensor)
        along = tensor.placements[self._axis]
        if along == Replicate() and not any(
            _shards(placement, self._dim) for placement in tensor.placements
        ):
            return self._map_local(tensor, self._permute)
        if self._is_output and along == Shard(self._dim):
            with moving(self._step, tensor.placements, tensor.placements):
                return self._map_local(tensor, self._exchange)
        raise ValueError(
            f"{self._what}: expected a sequence that is replicated along {self._axis_name!r}, to "
            f"be reordered and sharded, or an output that is replicated or sharded, got "
            f"{format_placement(along)}"
        )

    def _map_local(
        self, tensor: DTensor, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> DTensor:
        local = function(tensor.to_local(grad_placements=tensor.placements))
        return DTensor.from_local(
            local, self._mesh, tensor.placements, run_check=False, shape=tensor.shape,
            stride=tensor.stride(),
        )  # fmt: skip

    def _permute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reorders a tensor that has the full sequence."""
        if self._order.name == "contiguous":
            return tensor
        positions = self._order.positions(tensor.shape[self._dim], tensor.device)
        index = positions.argsort() if self._is_output else positions
        return tensor.index_select(self._dim, index)

    def _exchange(self, local: torch.Tensor) -> torch.Tensor:
        """Sends this rank's chunks to the ranks that have them in contiguous order."""
        if self._order.name == "contiguous":
            return local
        group = self._mesh.get_group(self._axis).group_name
        exchanged: torch.Tensor = _ChunkExchange.apply(  # type: ignore[no-untyped-call]
            local, self._dim, _chunks_in_order(self._order), _chunks_in_sequence(self._order),
            self._mesh.get_local_rank(self._axis), group, self._backward_context,
        )  # fmt: skip
        return exchanged


def _shards(placement: Placement, dim: int) -> bool:
    return getattr(placement, "dim", None) == dim


_ChunksByRank: TypeAlias = tuple[tuple[int, ...], ...]


def _chunks_in_order(order: SequenceSharding) -> _ChunksByRank:
    return tuple(order.chunks_of(rank) for rank in range(order.ranks))


def _chunks_in_sequence(order: SequenceSharding) -> _ChunksByRank:
    """Returns the ranks' chunks if as many chunks are in contiguous order."""
    each = order.chunks // order.ranks
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(order.ranks))


class _ChunkExchange(torch.autograd.Function):
    """Sends chunks to the ranks that have them afterwards; gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        dim: int,
        before: _ChunksByRank,
        after: _ChunksByRank,
        rank: int,
        group: str,
        at: StepContext,
    ) -> torch.Tensor:
        ctx.at = at
        ctx.backward_args = (dim, after, before, rank, group)
        return _exchange_chunks(local, dim, before, after, rank, group)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _exchange_chunks(grads[0], *ctx.backward_args), *[None] * 6


def _exchange_chunks(
    local: torch.Tensor,
    dim: int,
    before: _ChunksByRank,
    after: _ChunksByRank,
    rank: int,
    group: str,
) -> torch.Tensor:
    own = dict(zip(before[rank], local.chunk(len(before[rank]), dim), strict=True))
    sent = [[chunk for chunk in chunks if chunk in own] for chunks in after]
    received = [[chunk for chunk in after[rank] if chunk in chunks] for chunks in before]
    ops = torch.ops._c10d_functional
    rows = torch.stack([own[chunk] for chunks in sent for chunk in chunks])
    output = ops.wait_tensor(
        ops.all_to_all_single(
            rows, [len(one) for one in received], [len(one) for one in sent], group
        )
    )
    by_chunk = dict(zip([chunk for chunks in received for chunk in chunks], output, strict=True))
    return torch.cat([by_chunk[chunk] for chunk in after[rank]], dim)


def install_label_shifts(model: nn.Module, sites: Iterable[Site]) -> Iterator[RemovableHandle]:
    """Installs hooks that shift labels, before they are sharded.

    A token is predicted from the previous one, which in a sharded sequence may be on another rank.
    So labels are shifted while each rank has all of them, and passed as another argument.

    Args:
        model: any model.
        sites: the sites of a plan.
    """
    for site in sites:
        for step in site.steps:
            for move in step.moves.values():
                shifted = dict(move.options).get("shift") if step.kind is OpKind.ORDER else None
                if shifted is not None:
                    module = model.get_submodule(site.path)
                    hook = _LabelShift(step.index, shifted, getattr(move.dst, "dim", 0), module)
                    yield module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


class _LabelShift:
    """Passes labels shifted by one token as another argument, unless that is already there."""

    def __init__(self, index: int | str, shifted: str, dim: int, module: nn.Module) -> None:
        self._place, self._name = argument_slot(index, positional_names(module))
        self._shifted, self._dim = shifted, dim

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = args[self._place] if self._place < len(args) else kwargs.get(self._name)
        if labels is None or kwargs.get(self._shifted) is not None:
            return None
        length = labels.shape[self._dim]
        rest = labels.narrow(self._dim, 1, length - 1)
        last = labels.narrow(self._dim, 0, 1).clone().fill_(IGNORE_INDEX)
        return args, {**kwargs, self._shifted: torch.cat([rest, last], self._dim)}
