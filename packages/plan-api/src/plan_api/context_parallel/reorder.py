"""Reorders sequences: inputs into the order of the ranks' chunks, outputs back; shifts labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.batch import order_of
from plan_api.context_parallel.order import Positions, SequenceSharding, TokenOrder
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

    A tensor that is replicated along the axis is reordered without communication. Tokens of an
    output that is sharded are sent to the ranks of a contiguous shard, by one all-to-all. Inputs
    are padded, and outputs unpadded, where the length is that of a batch of `attention_mask`.

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
        self._padding = IGNORE_INDEX if _is_labels(step, site) else 0
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
        order = order_of(self._order, tensor.shape[self._dim], self._what)
        if not isinstance(tensor, DTensor):
            return self._permute(tensor, order)
        along = tensor.placements[self._axis]
        if along == Replicate() and not any(
            _shards(placement, self._dim) for placement in tensor.placements
        ):
            return self._map_local(tensor, lambda local: self._permute(local, order))
        if self._is_output and along == Shard(self._dim):
            with moving(self._step, tensor.placements, tensor.placements):
                return self._map_local(
                    tensor, lambda local: self._exchange(local, order), order.length
                )
        raise ValueError(
            f"{self._what}: expected a sequence that is replicated along {self._axis_name!r}, to "
            f"be reordered and sharded, or an output that is replicated or sharded, got "
            f"{format_placement(along)}"
        )

    def _map_local(
        self,
        tensor: DTensor,
        function: Callable[[torch.Tensor], torch.Tensor],
        length: int | None = None,
    ) -> DTensor:
        """Maps the local tensor; the sequence of the result has its length, or this one."""
        local = function(tensor.to_local(grad_placements=tensor.placements))
        shape = list(tensor.shape)
        shape[self._dim] = local.shape[self._dim] if length is None else length
        stride = tensor.stride()
        if shape != list(tensor.shape):
            stride = torch.empty(shape, device="meta").stride()
            local = local.contiguous()
        return DTensor.from_local(
            local, self._mesh, tensor.placements, run_check=False, shape=torch.Size(shape),
            stride=stride,
        )  # fmt: skip

    def _permute(self, tensor: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Reorders a tensor that has the full sequence: an input is padded, an output unpadded."""
        if order.is_contiguous and order.padded_length == order.length:
            return tensor
        positions = order.positions(tensor.device)
        if self._is_output:
            return tensor.index_select(self._dim, positions.argsort()[: order.length])
        missing = order.padded_length - tensor.shape[self._dim]
        if missing:
            shape = list(tensor.shape)
            shape[self._dim] = missing
            tensor = torch.cat([tensor, tensor.new_full(shape, self._padding)], self._dim)
        return tensor.index_select(self._dim, positions)

    def _exchange(self, local: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Sends this rank's tokens to the ranks that have them in contiguous order."""
        if order.is_contiguous and order.padded_length == order.length:
            return local
        group = self._mesh.get_group(self._axis).group_name
        exchanged: torch.Tensor = _TokenExchange.apply(  # type: ignore[no-untyped-call]
            local, self._dim, order.parts, _contiguous(order),
            self._mesh.get_local_rank(self._axis), group, self._backward_context,
        )  # fmt: skip
        return exchanged


def _is_labels(step: SiteStep, site: Site) -> bool:
    """Whether a step's tensor has labels, or those that have been shifted."""
    shifts = {
        other.index: shift
        for other in site.steps
        for move in other.moves.values()
        if (shift := dict(move.options).get("shift")) is not None
    }
    return step.index in shifts or step.index in shifts.values()


def _shards(placement: Placement, dim: int) -> bool:
    return getattr(placement, "dim", None) == dim


def _contiguous(order: TokenOrder) -> tuple[Positions, ...]:
    """Returns the positions of a contiguous shard on each rank, without padding, as torch shards.

    Ranks behind the end of the sequence have none.
    """
    length, ranks = order.length, order.ranks
    each = -(-length // ranks)
    bounds = [(min(n * each, length), min((n + 1) * each, length)) for n in range(ranks)]
    return tuple((bound,) if bound[0] < bound[1] else () for bound in bounds)


class _TokenExchange(torch.autograd.Function):
    """Sends tokens to the ranks that have them afterwards; gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        dim: int,
        before: tuple[Positions, ...],
        after: tuple[Positions, ...],
        rank: int,
        group: str,
        at: StepContext,
    ) -> torch.Tensor:
        ctx.at = at
        ctx.backward_args = (dim, after, before, rank, group)
        return _exchange_tokens(local, dim, before, after, rank, group)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _exchange_tokens(grads[0], *ctx.backward_args), *[None] * 6


def _exchange_tokens(
    local: torch.Tensor,
    dim: int,
    before: tuple[Positions, ...],
    after: tuple[Positions, ...],
    rank: int,
    group: str,
) -> torch.Tensor:
    """Returns the tokens that this rank has afterwards; those that no rank had before are zero."""
    own, wanted = _places(before[rank]), _places(after[rank])
    sent = [[one for one in _places(part) if one in own] for part in after]
    received = [[one for one in _places(part) if one in wanted] for part in before]
    rows = local.movedim(dim, 0)
    index = torch.tensor([own[one] for part in sent for one in part], device=local.device)
    ops = torch.ops._c10d_functional
    moved: torch.Tensor = ops.wait_tensor(
        ops.all_to_all_single(
            rows.index_select(0, index.long()).contiguous(),
            [len(part) for part in received], [len(part) for part in sent], group,
        )
    )  # fmt: skip
    place = torch.tensor([wanted[one] for part in received for one in part], device=local.device)
    result = moved.new_zeros(len(wanted), *moved.shape[1:])
    return result.index_copy(0, place.long(), moved).movedim(0, dim)


def _places(positions: Positions) -> dict[int, int]:
    """Returns the place on its rank of each position, in ascending order."""
    every = (position for start, stop in positions for position in range(start, stop))
    return {position: place for place, position in enumerate(every)}


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
