"""Clips gradients of any meshes: those of a group are one tensor.

Note: how the norm over all ranks is computed.
    Local gradients of one mesh that are sharded on the same axes are one term, of few flat tensors.
    A term counts on the first rank of each axis that replicates it, and the terms of a mesh are
    summed in one all-reduce for each axis that shards any gradient, as powers in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import utils

from fsdp.collectives.contiguous import contiguous_runs, flat_view

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]

#: The axes of a mesh along which gradients are sharded.
Axes = tuple[int, ...]
#: Elements of a row. The CPU sums the squares of a tensor in one float32 per lane, which loses
#: four digits in a buffer of 40 million elements; the norm of the norms of rows does not.
_ROW = 4096


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips gradients as `torch.nn.utils.clip_grad_norm_`, on any meshes and plain ones.

    torch's function refuses gradients on several meshes, as those of experts and of other
    parameters under expert parallelism are, and runs each operator once per parameter. Here the
    gradients of a group are one tensor, as far as they are views of one reduced buffer and no
    padding is between them, so the order of summation differs from torch's. Each mesh has one
    all-reduce of a float64 for each axis along which gradients are sharded. Plain tensors count
    once, so they have to be the same on every rank. Stages of a pipeline on other ranks are not
    included: `get_total_norm` and `clip_grads_with_norm_` are for these.

    Args:
        parameters: of one model, on every rank in the same order.
        max_norm: the largest norm of all gradients together.
        norm_type: above 0; ``inf`` for the largest element.
        error_if_nonfinite: whether a norm that is inf or nan is an error.
        foreach: as of torch's.

    Returns:
        The norm before clipping: a plain scalar, the same on every rank.

    Raises:
        ValueError: another `norm_type`.
        RuntimeError: the norm is not finite and that is an error.
    """
    params = _listed(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    clip_grads_with_norm_(params, max_norm, total, foreach)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Returns the norm of all tensors together, as `torch.nn.utils.get_total_norm`, on any meshes.

    It computes and sends what `clip_grad_norm_` does. Stages of a pipeline on other ranks are not
    included; squares of norms add up over them::

        grads = [param.grad for param in stage.parameters() if param.grad is not None]
        square = fsdp.get_total_norm(grads).square()
        dist.all_reduce(square, group=mesh["pp"].get_group())
        fsdp.clip_grads_with_norm_(stage.parameters(), 1.0, square.sqrt())

    Args:
        tensors: gradients of one model or stage, on every rank in the same order.
        norm_type: as of `clip_grad_norm_`.
        error_if_nonfinite: as of `clip_grad_norm_`.
        foreach: as of torch's.

    Returns:
        A plain scalar, the same on every rank of the meshes; 0 without tensors.

    Raises:
        ValueError: another `norm_type`.
        RuntimeError: the norm is not finite and that is an error.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"fsdp: expected a norm_type above 0, got {norm_type!r}")
    grads = _listed(tensors)
    total = _total_norm(grads, order, foreach) if grads else torch.tensor(0.0)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it "
            f"cannot be clipped. To disable this error and scale the gradients by the non-finite "
            f"norm anyway, set `error_if_nonfinite=False`"
        )
    return total


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scales gradients as `torch.nn.utils.clip_grads_with_norm_`, those of a group as one tensor.

    Args:
        parameters: of one model or stage.
        max_norm: the largest norm of all gradients together.
        total_norm: their norm, a plain scalar.
        foreach: as of torch's.
    """
    grads = [_local(param.grad) for param in _listed(parameters) if param.grad is not None]
    _scale(grads, (max_norm / (total_norm + 1e-6)).clamp(max=1.0), foreach)


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _total_norm(grads: Sequence[torch.Tensor], order: float, foreach: bool | None) -> torch.Tensor:
    """Returns the norm of all gradients on all ranks, of their dtype and device."""
    placed: dict[DeviceMesh | None, dict[Axes, list[torch.Tensor]]] = {}
    for grad in grads:
        mesh: DeviceMesh | None = None
        axes: Axes = ()
        if isinstance(grad, DTensor):
            grad = _reduced(grad)
            mesh, placements = grad.device_mesh, grad.placements
            axes = tuple(n for n, p in enumerate(placements) if not isinstance(p, Replicate))
        placed.setdefault(mesh, {}).setdefault(axes, []).append(_local(grad))
    device = _local(grads[0]).device
    totals, dtypes = [], []
    for mesh, by_axes in placed.items():
        terms: dict[Axes, torch.Tensor] = {}
        for axes, local in by_axes.items():
            norm = _local_norm(local, order, foreach)
            dtypes.append(norm.dtype)
            terms[axes] = norm.double() if order == math.inf else norm.double() ** order
        totals.append(_over_mesh(terms, mesh, order).to(device))
    total = _combine(totals, order)
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return (total if order == math.inf else total ** (1.0 / order)).to(dtype)


def _reduced(grad: DTensor) -> DTensor:
    """Returns a gradient without Partial placements."""
    if not any(isinstance(placement, Partial) for placement in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements]
    )


def _local_norm(local: Sequence[torch.Tensor], order: float, foreach: bool | None) -> torch.Tensor:
    """Returns the norm of local tensors together; 0 for empty ones, which have no largest one."""
    tensors = [tensor for tensor in local if tensor.numel()]
    if not tensors:
        return local[0].new_zeros(())
    parts = [part for tensor in _flat(tensors) for part in _with_row_norms(tensor, order)]
    return utils.get_total_norm(parts, order, False, foreach)


def _with_row_norms(tensor: torch.Tensor, order: float) -> list[torch.Tensor]:
    """Returns tensors with the norm of a tensor together: the norms of rows of a large one."""
    if tensor.device.type != "cpu" or tensor.numel() < 2 * _ROW or not tensor.is_contiguous():
        return [tensor]
    flat, rows = tensor.view(-1), tensor.numel() // _ROW
    norms = torch.linalg.vector_norm(flat[: rows * _ROW].view(rows, _ROW), order, dim=1)
    return [norms, flat[rows * _ROW :]] if tensor.numel() % _ROW else [norms]


def _over_mesh(
    terms: Mapping[Axes, torch.Tensor], mesh: DeviceMesh | None, order: float
) -> torch.Tensor:
    """Returns the sum (the largest, for ``inf``) of the terms of all ranks of a mesh.

    Args:
        terms: scalars, float64, by the axes along which their gradients are sharded.
        mesh: None for plain tensors.
        order: of the norm.
    """
    if mesh is None:
        return _combine(list(terms.values()), order)
    own: Any = mesh.get_coordinate()
    axes = sorted({axis for sharded in terms for axis in sharded if mesh.size(axis) > 1})
    counted = [
        term if all(axis in sharded or own[axis] == 0 for axis in axes) else torch.zeros_like(term)
        for sharded, term in terms.items()
    ]
    total = _combine(counted, order)
    op = dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM
    for axis in axes:
        dist.all_reduce(total, op, group=mesh.get_group(axis))
    return total


def _combine(terms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    stacked = torch.stack(list(terms))
    return stacked.max() if order == math.inf else stacked.sum()


def _scale(local: Sequence[torch.Tensor], scale: torch.Tensor, foreach: bool | None) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in local:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, tensors in by_device.items():
        flat, factor = _flat(tensors), scale.to(device)
        if foreach is False:
            for tensor in flat:
                tensor.mul_(factor)
        else:
            torch._foreach_mul_(flat, factor)


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [flat_view([tensors[i] for i in run]) for run in contiguous_runs([tensors])]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
