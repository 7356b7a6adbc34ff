"""A linear layer on DTensors that quantizes the operands of its products."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.ops.low_precision.linear import FeatureGroups, LowPrecision, low_precision_linear

__all__ = ["feature_groups", "low_precision_linear_of_dtensors"]


def feature_groups(
    mesh: DeviceMesh, weight: tuple[Placement, ...], first_dim: int = 0
) -> FeatureGroups:
    """Returns the groups of ranks that shard a weight (N, K), or those of experts (E, N, K).

    Args:
        mesh: of the weight.
        weight: its placements while it is used: torch's shards, or ragged-shard's of fused
            projections.
        first_dim: the dim of N; 1 for weights of experts.
    """
    outputs, inputs = (
        tuple(
            mesh.get_group(axis)
            for axis, placement in enumerate(weight)
            if getattr(placement, "dim", None) == dim and mesh.size(axis) > 1
        )
        for dim in (first_dim, first_dim + 1)
    )
    return FeatureGroups(outputs, inputs)


def low_precision_linear_of_dtensors(
    x: torch.Tensor, weight: DTensor, bias: torch.Tensor | None, precision: LowPrecision
) -> torch.Tensor:
    """Computes `low_precision_linear` on local tensors; placements are those of torch's operator.

    Along an axis that shards output features the input is gathered, along one that shards input
    features it is sharded likewise, and the output is Partial.

    Args:
        x: (..., K), a DTensor on the weight's mesh.
        weight: (N, K), replicated or sharded along each axis.
        bias: (N,) or None, a DTensor.
        precision: as in `low_precision_linear`.
    """
    if not isinstance(x, DTensor):  # whose error says what to do
        return torch.nn.functional.linear(x, weight, bias)
    mesh, last = weight.device_mesh, x.ndim - 1
    before = tuple(map(_of_input, x.placements, weight.placements, [last] * mesh.ndim))
    output: list[Placement] = [*before]
    of_x: list[Placement] = [*before]
    of_weight: list[Placement] = [*before]
    for axis, placement in enumerate(weight.placements):
        if getattr(placement, "dim", None) == 0:
            output[axis], of_x[axis], of_weight[axis] = _on(last, placement), Partial(), placement
        elif placement.is_shard(1):
            output[axis], of_weight[axis] = Partial(), placement
        elif not before[axis].is_replicate():  # each rank has the gradient of its tokens
            of_weight[axis] = Partial()
    if before != x.placements:
        x = x.redistribute(placements=before)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    y = DTensor.from_local(
        low_precision_linear(
            x.to_local(grad_placements=of_x),
            weight.to_local(grad_placements=of_weight),
            None,
            precision,
            feature_groups(mesh, weight.placements),
        ),
        mesh, output, run_check=False, shape=shape, stride=_contiguous_strides(shape),
    )  # fmt: skip
    return y if bias is None else y + bias.to(y.dtype)


def _of_input(placement: Placement, weight: Placement, last: int) -> Placement:
    """Returns the placement of the input along an axis, which the product takes."""
    if weight.is_shard(1):
        return Shard(last)
    is_of_tokens = placement.is_shard() and not placement.is_shard(last)
    return placement if weight.is_replicate() and is_of_tokens else Replicate()


def _on(dim: int, placement: Placement) -> Placement:
    """Returns the shard of another dim, of a fused projection too (ragged-shard)."""
    fused: Any = placement
    return Shard(dim) if placement.is_shard() else fused.with_dim(dim)


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
