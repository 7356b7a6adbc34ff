"""Which parameters of a call are one group, its dtypes, and the layout of its buffer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp import _compat
from fsdp.collectives.grad_dtype import reduce_dtype_of
from fsdp.mesh.granularity import Whole
from fsdp.param import FSDPParam
from ragged_shard.planner import Layout, TensorSpec, plan_layout

__all__ = ["Dtypes", "balance_owners", "dtypes_of", "group_params", "plan_buffer", "tensor_specs"]

ALIGNMENT = 16  # bytes, of which every shard is a multiple in every dtype that it is sent in


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one group.

    Attributes:
        sharded: of the sharded parameters and their gradients.
        compute: of the unsharded parameters and their all-gather.
        reduce: of the gradients' reduction.
    """

    sharded: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def dtypes_of(
    params: Sequence[FSDPParam], dtype: torch.dtype, policy: MixedPrecisionPolicy
) -> Dtypes:
    """Returns the dtypes of parameters of one dtype under a policy; only floats are cast."""
    param_dtype = policy.param_dtype
    compute = param_dtype if param_dtype is not None and dtype.is_floating_point else dtype
    return Dtypes(dtype, compute, reduce_dtype_of(params, dtype, compute, policy))


def group_params(
    params: Sequence[FSDPParam], mp_policy: MixedPrecisionPolicy
) -> list[list[FSDPParam]]:
    """Splits the parameters of one call into those of each group.

    A group has one mesh and dtype, is trained or not, is on meta or not, has extensions or not, and
    is placed on the mesh's axes already or not.
    """
    groups: dict[object, list[FSDPParam]] = {}
    for param in params:
        original = param.orig_param
        param_dtype = _compat.policy_of(original, mp_policy).param_dtype
        on_meta = original.device.type == "meta"
        on_fsdp_axes = param.placement is not None and bool(param.placement.fsdp_axes)
        key = (
            param.mesh, original.dtype, param_dtype, original.requires_grad, on_meta,
            param.extension, on_fsdp_axes,
        )  # fmt: skip
        groups.setdefault(key, []).append(param)
    return list(groups.values())


def tensor_specs(params: Sequence[FSDPParam]) -> tuple[TensorSpec, ...]:
    """Returns the planner's input for the parameters of a group."""
    return tuple(
        TensorSpec(p.name, math.prod(p.local_shape), p.block, p.local_shape) for p in params
    )


def plan_buffer(specs: tuple[TensorSpec, ...], ranks: int, dtypes: Dtypes) -> Layout:
    """Plans the layout of a group's tensors in a buffer of `ranks` equal shards."""
    smallest = min(dtype.itemsize for dtype in (dtypes.sharded, dtypes.compute, dtypes.reduce))
    return plan_layout(
        specs,
        ranks,
        alignment=max(1, ALIGNMENT // smallest),
        order="best" if any(spec.block > 1 for spec in specs) else "given",
    )


def balance_owners(layout: Layout, params: Sequence[FSDPParam], ranks: Hashable) -> Layout:
    """Gives `Whole` parameters to the ranks with the least optimizer work; sizes stay the same.

    Args:
        layout: of the parameters.
        params: of a group.
        ranks: those over which it is sharded, as a mesh, or any key that groups of a model share.
    """
    wholes = [param.whole or Whole() for param in params]
    for balance in dict.fromkeys(one.balance for one in wholes if one.balance is not None):
        work = [one.work if one.balance is balance else 0 for one in wholes]
        layout = balance.place(layout, work, ranks)
    return layout
