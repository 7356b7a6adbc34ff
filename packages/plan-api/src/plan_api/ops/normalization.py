"""Batch and group norm of sharded tensors, with the numbers of one device.

DTensor gathers the input of a batch norm whose batch is sharded, updates only a part of the running
statistics where channels are sharded and they are not, and has no backward of group norm. Here
`torch.nn.functional`'s functions run on the local tensors of DTensors (`use_local_norms`): a batch
norm sends two numbers per channel in forward and two in backward, as `nn.SyncBatchNorm` does, a
group norm none, and the output is sharded as the input. Static mode calls the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.ops.function_calls import TorchFunction, replace_for_dtensors
from plan_api.runtime.local_redistribute import local_redistribution

__all__ = ["batch_norm", "groups_of_rank", "use_local_norms"]

_Placements: TypeAlias = tuple[Placement, ...]
_Tensor: TypeAlias = torch.Tensor | None
_BATCH, _CHANNELS = 0, 1


def use_local_norms() -> Callable[[], None]:
    """Replaces `batch_norm` and `group_norm` of `torch.nn.functional` for DTensors.

    Returns:
        the inverse.
    """
    restores = [
        replace_for_dtensors("batch_norm", _batch_norm_of_dtensors),
        replace_for_dtensors("group_norm", _group_norm_of_dtensors),
    ]

    def restore() -> None:
        for one in restores:
            one()

    return restore


def batch_norm(
    native: TorchFunction,
    mesh: DeviceMesh,
    axes: Sequence[int],
    input: torch.Tensor,  # noqa: A002  # torch's name
    running_mean: _Tensor,
    running_var: _Tensor,
    weight: _Tensor = None,
    bias: _Tensor = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Computes `torch.nn.functional.batch_norm` of a local tensor.

    Args:
        native: torch's function.
        mesh: of the tensor.
        axes: that shard its batch, or what is behind the channels; ranks may have any number of
            rows. Gradients of weight and bias are this rank's terms of sums over these axes.
        input: (batch, channels, ...), local, as are the others.
        running_mean: as torch's function takes it, as are the others.
        running_var: see there.
        weight: see there.
        bias: see there.
        training: see there.
        momentum: see there.
        eps: see there.
    """
    if not training or not axes:
        result: torch.Tensor = native(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
        return result
    result, mean, squares, count = _BatchNorm.apply(input, weight, bias, eps, mesh, tuple(axes))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean * momentum)
        if running_var is not None:  # of the unbiased variance
            running_var.mul_(1 - momentum).add_(squares / (count - 1) * momentum)
    return result


def groups_of_rank(num_groups: int, mesh: DeviceMesh, placements: _Placements) -> int:
    """Returns the number of groups of a rank's channels.

    Args:
        num_groups: of all channels.
        mesh: of the input of `group_norm`.
        placements: of the input, (batch, channels, ...).

    Raises:
        ValueError: a group is on several ranks.
    """
    ranks = 1
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", _BATCH)
        ranks *= mesh.size(axis) if dim == _CHANNELS else 1
        if type(placement) not in (Replicate, Shard) or dim > _CHANNELS or num_groups % ranks:
            raise ValueError(
                f"group_norm: expected the batch sharded, or {num_groups} groups of channels by an "
                f"axis that divides their number, got {placements} on {tuple(mesh.shape)} ranks; "
                f"shard the input otherwise, or replicate it"
            )
    return num_groups // ranks


class _BatchNorm(torch.autograd.Function):
    """Normalizes by the statistics of all ranks, as `torch.nn.modules._functions.SyncBatchNorm`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        weight: _Tensor,
        bias: _Tensor,
        eps: float,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]:
        mean, squares, count = _global_statistics(_wide(tensor), mesh, axes)
        scale = (squares / count + eps).rsqrt()
        result = (_wide(tensor) - _per_channel(mean, tensor)) * _per_channel(scale, tensor)
        if weight is not None:
            result = result * _per_channel(weight, tensor)
        if bias is not None:
            result = result + _per_channel(bias, tensor)
        ctx.save_for_backward(tensor, weight, mean, scale, count)
        ctx.mesh, ctx.axes = mesh, axes
        ctx.mark_non_differentiable(mean, squares, count)
        return result.to(tensor.dtype), mean, squares, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        tensor, weight, mean, scale, count = ctx.saved_tensors
        grad, dims = _wide(grads[0]), _other_dims(tensor)
        normalized = (_wide(tensor) - _per_channel(mean, tensor)) * _per_channel(scale, tensor)
        of_bias, of_weight = grad.sum(dims), (grad * normalized).sum(dims)
        sums = torch.cat([of_bias, of_weight])
        for axis in ctx.axes:
            sums = funcol.all_reduce(sums, "sum", (ctx.mesh, axis))
        mean_grad, mean_product = (_per_channel(one, tensor) for one in (sums / count).chunk(2))
        if weight is not None:
            scale = scale * weight
        result = (grad - mean_grad - normalized * mean_product) * _per_channel(scale, tensor)
        needs = ctx.needs_input_grad
        return (
            result.to(tensor.dtype),
            of_weight.to(weight.dtype) if needs[1] else None,
            of_bias.to(grads[0].dtype if weight is None else weight.dtype) if needs[2] else None,
            None, None, None,
        )  # fmt: skip


def _global_statistics(
    tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns mean, sum of squared deviations and number of elements of each channel."""
    channels = tensor.shape[_CHANNELS]
    count = tensor.numel() // max(channels, 1)
    own = tensor.new_zeros(1, 2 * channels + 1)
    if count:
        variance, mean = torch.var_mean(tensor, _other_dims(tensor), correction=0)
        number = torch.full_like(mean[:1], count)
        own = torch.cat([mean, variance * count, number]).unsqueeze(0)
    for axis in axes:
        gather = local_redistribution(Shard(0), Replicate(), mesh, axis, "statistics of batch_norm")
        own = gather(own)
    counts = own[:, -1:]
    means, squares = own[:, :channels], own[:, channels:-1]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    # Chan, Golub, LeVeque (1979): parts are joined without sums of large squares.
    deviation = squares + counts * (means - mean).square()
    return mean, deviation.sum(0), total


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.half, torch.bfloat16) else tensor


def _other_dims(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.ndim) if dim != _CHANNELS]


def _per_channel(vector: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return vector.view([-1 if dim == _CHANNELS else 1 for dim in range(tensor.ndim)])


@dataclass(frozen=True)
class _LocalCall:
    """The local tensor of a normalized DTensor, without Partials.

    Attributes:
        source: the DTensor.
        tensor: its local tensor; gradients have its placements.
        placements: of the tensor, and of the result.
    """

    source: DTensor
    tensor: torch.Tensor
    placements: _Placements

    @classmethod
    def of(cls, source: DTensor) -> _LocalCall | None:
        """Makes it of the input; None for other placements than torch's, which torch computes."""
        placements: _Placements = tuple(
            Replicate() if placement.is_partial() else placement for placement in source.placements
        )
        if not {type(placement) for placement in placements} <= {Shard, Replicate}:
            return None
        moved = source.redistribute(placements=placements)
        return cls(source, moved.to_local(grad_placements=placements), placements)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the input."""
        return self.source.device_mesh

    @property
    def axes_of_rows(self) -> list[int]:
        """The axes that shard what is normalized together."""
        return [
            axis
            for axis, placement in enumerate(self.placements)
            if not placement.is_replicate() and not placement.is_shard(_CHANNELS)
        ]

    def param(self, param: _Tensor) -> _Tensor:
        """Returns this rank's channels of a weight or bias, whose gradient is Partial over rows."""
        if not isinstance(param, DTensor):
            param = None if param is None else self._replicated(param)
        if param is None:
            return None
        grads = [Partial() if axis in self.axes_of_rows else one for axis, one in self._channels]
        placements = tuple(one for _, one in self._channels)
        if param.placements != placements:  # whose backward would reduce a Partial gradient
            param = param.redistribute(placements=placements)
        return param.to_local(grad_placements=grads)

    def statistics(self, running: _Tensor, is_updated: bool) -> _Tensor:
        """Returns this rank's channels of running statistics.

        Raises:
            ValueError: they are updated, and placed otherwise than the channels.
        """
        if running is None:
            return None
        placed = running if isinstance(running, DTensor) else self._replicated(running)
        placements = tuple(one for _, one in self._channels)
        if is_updated and placed.placements != placements:
            raise ValueError(
                f"batch_norm: expected running statistics placed as the channels of the input, "
                f"{placements}, to update them, got {placed.placements}; shard running_mean and "
                f"running_var as the channels"
            )
        return placed.redistribute(placements=placements)._local_tensor

    def wrap(self, result: torch.Tensor) -> DTensor:
        """Makes a local result a DTensor with the input's placements."""
        return DTensor.from_local(
            result, self.mesh, self.placements, run_check=False, shape=self.source.shape,
            stride=self.source.stride(),
        )  # fmt: skip

    @property
    def _channels(self) -> list[tuple[int, Placement]]:
        return [
            (axis, Shard(0) if placement.is_shard(_CHANNELS) else Replicate())
            for axis, placement in enumerate(self.placements)
        ]

    def _replicated(self, tensor: torch.Tensor) -> DTensor:
        replicate = [Replicate()] * self.mesh.ndim
        return DTensor.from_local(tensor, self.mesh, replicate, run_check=False)


def _batch_norm_of_dtensors(
    native: TorchFunction,
    input: DTensor,  # noqa: A002  # torch's name
    running_mean: _Tensor,
    running_var: _Tensor,
    weight: _Tensor = None,
    bias: _Tensor = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    call = _LocalCall.of(input)
    if call is None:
        return NotImplemented
    result = batch_norm(
        native, call.mesh, call.axes_of_rows, call.tensor,
        call.statistics(running_mean, training), call.statistics(running_var, training),
        call.param(weight), call.param(bias), training, momentum, eps,
    )  # fmt: skip
    return call.wrap(result)


def _group_norm_of_dtensors(
    native: TorchFunction,
    input: DTensor,  # noqa: A002  # torch's name
    num_groups: int,
    weight: _Tensor = None,
    bias: _Tensor = None,
    eps: float = 1e-5,
) -> Any:
    call = _LocalCall.of(input)
    if call is None:
        return NotImplemented
    groups = groups_of_rank(num_groups, call.mesh, call.placements)
    return call.wrap(native(call.tensor, groups, call.param(weight), call.param(bias), eps))
