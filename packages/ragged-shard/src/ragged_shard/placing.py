"""The seams where tensors become DTensors, and gradients too: `distribute_tensor`, `from_local`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from ragged_shard.boxes import contiguous_strides
from ragged_shard.fit import check_contiguous, check_local, check_placements
from ragged_shard.ragged import RaggedShard
from ragged_shard.rank_boxes import normalized
from ragged_shard.spec import (
    Placements,
    any_ours,
    base_shape,
    is_ours,
    local_shape,
    put,
    ragged_axis,
)
from ragged_shard.transform import scatter, transform


def distribute_tensor(
    stock: Callable[..., DTensor],
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """`torch.distributed.tensor.distribute_tensor`, knowing our placements.

    On a mesh of one axis the source rank sends each rank its pieces and no more. On several axes
    the axis of ours replicates first.

    Raises:
        ValueError: placements that do not fit; nothing was sent.
    """
    if placements is None or not any_ours(placements) or isinstance(tensor, DTensor):
        return stock(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    mesh = device_mesh or _mesh_resources.get_current_mesh()
    placements = tuple(normalized(placement, tensor.ndim) for placement in placements)
    check_placements(tensor.shape, mesh, placements)
    check_contiguous(tensor.shape, tensor.stride(), placements)
    others = tuple(Replicate() if is_ours(p) else p for p in placements)
    if mesh.ndim == 1:
        source = tensor.detach().to(mesh.device_type) if not tensor.is_meta else tensor.detach()
        local = scatter(source, placements[0], mesh, 0, src_data_rank)
    else:
        detached = tensor.detach()
        base = stock(detached, mesh, others, src_data_rank=src_data_rank)
        local = _put_on(base._local_tensor, tensor.shape, mesh, others, placements)
    meta = TensorMeta(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype)
    if ragged_axis(placements) is None:
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(
        local.requires_grad_(tensor.requires_grad),
        DTensorSpec(mesh, placements, tensor_meta=meta),
        requires_grad=tensor.requires_grad,
    )


def from_torch_tensor(
    stock: Callable[..., DTensor],
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
    """`_FromTorchTensor.forward`, behind `DTensor.from_local`, checking what ours needs.

    Raises:
        ValueError: no shape and stride, which a shard of ours does not tell; a local tensor that is
            not what the placements make of that shape on this rank; what does not fit the mesh.
    """
    if any_ours(placements):
        if shape is None or stride is None:
            raise ValueError(
                f"from_local: {placements} do not tell the global tensor's size from a local "
                f"tensor of {tuple(input.shape)}; pass shape= and stride="
            )
        placements = tuple(normalized(placement, len(shape)) for placement in placements)
        check_placements(shape, device_mesh, placements)
        check_contiguous(shape, stride, placements)
        wanted = local_shape(shape, device_mesh, placements)
        if tuple(input.shape) != wanted:
            raise ValueError(
                f"from_local: on rank {device_mesh.get_rank()}, coordinate "
                f"{device_mesh.get_coordinate()}, placements {placements} of a tensor of "
                f"{tuple(shape)} want a local tensor of {wanted}, got {tuple(input.shape)}"
            )
        if (
            ragged_axis(placements) is not None
            and not _waiting(input)
            and not input.is_contiguous()
        ):
            raise ValueError(
                f"from_local: a ragged shard is a run of storage, but the local tensor of "
                f"{tuple(input.shape)} has strides {input.stride()}; call .contiguous() first"
            )
    return stock(ctx, input, device_mesh, placements, run_check, shape, stride, *more, **options)


def unwrap_to_op_info(
    stock: Callable[..., Any],
    dispatcher: object,
    op_call: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    """`OpDispatcher.unwrap_to_op_info`, checking the local tensors of ragged operands.

    Torch calls it for an operator whose decision is not in the cache, so the check costs cached
    dispatch nothing: it meets a DTensor that was constructed directly at its first operator.

    Raises:
        ValueError: a local tensor of another shape than this package's, such as a flat one.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor):
            check_local(str(op_call), leaf._local_tensor, leaf._spec)
    return stock(dispatcher, op_call, args, kwargs)


def distribute_region(
    stock: Callable[..., Any], tracker: object, spec: DTensorSpec, *args: Any, **kwargs: Any
) -> Any:
    """`OffsetBasedRNGTracker._distribute_region`, behind torch's random numbers for DTensors.

    Raises:
        RuntimeError: a placement of this package, for which torch would draw the numbers of a
            replica on every rank.
    """
    if any_ours(spec.placements):
        raise random_refused("torch.distributed.tensor", spec.placements)
    return stock(tracker, spec, *args, **kwargs)


def random_refused(name: str, placements: Sequence[Placement]) -> RuntimeError:
    """The error of drawing random numbers without dist-rng."""
    return RuntimeError(
        f"{name}: torch by itself cannot draw random numbers for placements {tuple(placements)}; "
        f"install dist-rng and call dist_rng.install(), which draws what one device would"
    )


def to_local_backward(
    stock: Callable[..., object], ctx: Any, grad_output: torch.Tensor | None
) -> object:
    """`_ToTorchTensor.backward`: the gradient of a local tensor of ours is placed like it."""
    spec: DTensorSpec = ctx.dtensor_spec
    if grad_output is None or not any_ours(spec.placements):
        return stock(ctx, grad_output)
    meta = spec.tensor_meta
    assert meta is not None
    placements = ctx.grad_placements
    if placements is None:
        placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    grad = DTensor.from_local(
        grad_output.contiguous(), spec.mesh, placements, shape=meta.shape, stride=meta.stride
    )
    return grad, None


def _put_on(
    local: torch.Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    at: Placements,
    target: Placements,
) -> torch.Tensor:
    """From replicas on our axes to our placements, without communication."""
    axes = [axis for axis, placement in enumerate(target) if is_ours(placement)]
    axes.sort(key=lambda axis: isinstance(target[axis], RaggedShard))
    for axis in axes:
        base = base_shape(shape, mesh, at, axis)
        local = transform(local, Replicate(), target[axis], base, mesh, axis)
        at = put(at, axis, target[axis])
    return local.clone()


def _waiting(local: torch.Tensor) -> bool:
    return isinstance(local, AsyncCollectiveTensor)
