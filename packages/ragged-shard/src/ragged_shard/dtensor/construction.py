"""Patch points that construct DTensors and their gradients: `distribute_tensor`, `from_local`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.geometry.boxes import contiguous_strides
from ragged_shard.geometry.specs import (
    Placements,
    any_custom,
    base_shape,
    is_custom,
    local_shape,
    ragged_axis,
    replace_axis,
)
from ragged_shard.geometry.stored_boxes import normalized
from ragged_shard.geometry.validation import check_contiguous, check_placements
from ragged_shard.ragged import RaggedShard
from ragged_shard.redistribution.one_axis import redistribute_axis, scatter


def distribute_tensor(
    native: Callable[..., DTensor],
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Replaces `torch.distributed.tensor.distribute_tensor`.

    On a mesh of one axis the source rank sends each rank only its elements. On several axes those
    with placements of this package replicate first.

    Raises:
        ValueError: the placements do not fit; nothing is sent.
    """
    if placements is None or not any_custom(placements) or isinstance(tensor, DTensor):
        return native(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    mesh = device_mesh or _mesh_resources.get_current_mesh()
    placements = tuple(normalized(placement, tensor.ndim) for placement in placements)
    check_placements(tensor.shape, mesh, placements)
    check_contiguous(tensor.shape, tensor.stride(), placements)
    others = tuple(Replicate() if is_custom(p) else p for p in placements)
    if mesh.ndim == 1:
        source = tensor.detach().to(mesh.device_type) if not tensor.is_meta else tensor.detach()
        local = scatter(source, placements[0], mesh, 0, src_data_rank)
    else:
        detached = tensor.detach()
        base = native(detached, mesh, others, src_data_rank=src_data_rank)
        local = _shard_axes(base._local_tensor, tensor.shape, mesh, others, placements)
    meta = TensorMeta(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype)
    if ragged_axis(placements) is None:
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(
        local.requires_grad_(tensor.requires_grad),
        DTensorSpec(mesh, placements, tensor_meta=meta),
        requires_grad=tensor.requires_grad,
    )


def from_torch_tensor(
    native: Callable[..., DTensor],
    ctx: Any,
    input: torch.Tensor,  # noqa: A002 - torch's name, by which callers may pass it
    device_mesh: DeviceMesh,
    placements: Placements,
    run_check: bool,
    shape: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
    *more: object,
    **options: object,
) -> DTensor:
    """Replaces `_FromTorchTensor.forward` of `DTensor.from_local`, and checks ragged shards.

    Raises:
        ValueError: shape and stride are missing, which a ragged shard does not determine; the local
            tensor has another shape than the placements' on this rank; the placements do not fit
            the mesh.
    """
    if any_custom(placements):
        if shape is None or stride is None:
            raise ValueError(
                f"from_local: expected shape= and stride=, as {placements} do not determine the "
                f"global shape from a local tensor of shape {tuple(input.shape)}"
            )
        placements = tuple(normalized(placement, len(shape)) for placement in placements)
        check_placements(shape, device_mesh, placements)
        check_contiguous(shape, stride, placements)
        expected = local_shape(shape, device_mesh, placements)
        if tuple(input.shape) != expected:
            raise ValueError(
                f"from_local: expected a local tensor of shape {expected} on rank "
                f"{device_mesh.get_rank()}, coordinate {device_mesh.get_coordinate()}, for "
                f"{placements} of a tensor of shape {tuple(shape)}, got {tuple(input.shape)}"
            )
        if (
            ragged_axis(placements) is not None
            and not isinstance(input, AsyncCollectiveTensor)
            and not input.is_contiguous()
        ):
            raise ValueError(
                f"from_local: expected a contiguous local tensor, as a ragged shard is a range of "
                f"storage, got shape {tuple(input.shape)} with strides {input.stride()}; call "
                f".contiguous() first"
            )
    return native(ctx, input, device_mesh, placements, run_check, shape, stride, *more, **options)


def to_local_backward(
    native: Callable[..., object], ctx: Any, grad_output: torch.Tensor | None
) -> object:
    """Replaces `_ToTorchTensor.backward`: the gradient has the placements of the local tensor."""
    spec: DTensorSpec = ctx.dtensor_spec
    if grad_output is None or not any_custom(spec.placements):
        return native(ctx, grad_output)
    meta = spec.tensor_meta
    assert meta is not None
    placements = ctx.grad_placements
    if placements is None:
        placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    grad = DTensor.from_local(
        grad_output.contiguous(), spec.mesh, placements, shape=meta.shape, stride=meta.stride
    )
    return grad, None


def _shard_axes(
    local: torch.Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    at: Placements,
    target: Placements,
) -> torch.Tensor:
    """Shards the axes with placements of this package, without communication."""
    axes = [axis for axis, placement in enumerate(target) if is_custom(placement)]
    axes.sort(key=lambda axis: isinstance(target[axis], RaggedShard))
    for axis in axes:
        base = base_shape(shape, mesh, at, axis)
        local = redistribute_axis(local, Replicate(), target[axis], base, mesh, axis)
        at = replace_axis(at, axis, target[axis])
    return local.clone()
