"""Which parameters make one buffer, in which dtypes, and where they lie in it.

`fully_shard` and `fsdp.simulate` both plan by what is here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp import _compat
from fsdp.parameter import ManagedParameter
from fsdp.policy import Whole
from ragged_shard.planner import Layout, TensorSpec, plan_layout

__all__ = ["Dtypes", "alike", "balanced", "dtypes_of", "plan_buffer", "specs_of"]

ALIGNMENT = 16  # bytes, of which every shard is a multiple in every dtype that it is sent in


@dataclass(frozen=True)
class Dtypes:
    """Of one group.

    Attributes:
        sharded: of the parameters and their gradients between steps.
        compute: of the unsharded parameters and their gathers.
        reduce: of the gradients' reduction.
    """

    sharded: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def dtypes_of(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    """What a policy makes of parameters of one dtype; only floats are cast."""
    wanted = policy.param_dtype
    compute = wanted if wanted is not None and dtype.is_floating_point else dtype
    reduce = policy.reduce_dtype or _compat.default_reduce_dtype(dtype, compute)
    return Dtypes(dtype, compute, reduce)


def alike(
    params: Sequence[ManagedParameter], mp_policy: MixedPrecisionPolicy
) -> list[list[ManagedParameter]]:
    """The parameters of one call by what makes one buffer of them.

    That is: mesh, dtypes, trained or not, on meta or not, gathered through hooks or not, placed
    on the mesh's axes already or not.
    """
    groups: dict[object, list[ManagedParameter]] = {}
    for param in params:
        given = param.given
        computes = _compat.policy_of(given, mp_policy).param_dtype
        on_meta = given.device.type == "meta"
        own = param.placed is not None and bool(param.placed.own)
        key = (
            param.mesh, given.dtype, computes, given.requires_grad, on_meta, param.extension, own,
        )  # fmt: skip
        groups.setdefault(key, []).append(param)
    return list(groups.values())


def specs_of(params: Sequence[ManagedParameter]) -> tuple[TensorSpec, ...]:
    """What the planner is told of a group's parameters."""
    return tuple(TensorSpec(p.name, math.prod(p.shape), p.block, p.shape) for p in params)


def plan_buffer(specs: tuple[TensorSpec, ...], ranks: int, dtypes: Dtypes) -> Layout:
    """Where the tensors of a group lie in a buffer of `ranks` equal shards."""
    smallest = min(dtype.itemsize for dtype in (dtypes.sharded, dtypes.compute, dtypes.reduce))
    return plan_layout(
        specs,
        ranks,
        alignment=max(1, ALIGNMENT // smallest),
        order="best" if any(spec.block > 1 for spec in specs) else "given",
    )


def balanced(layout: Layout, params: Sequence[ManagedParameter], ranks: Hashable) -> Layout:
    """The same buffer, with whole parameters at the ranks whose optimizer has least to do.

    Args:
        layout: of the parameters.
        params: of a group.
        ranks: those over which it is cut, as a mesh; any key by which groups of a model share them.
    """
    wholes = [param.whole or Whole() for param in params]
    for balance in dict.fromkeys(one.balance for one in wholes if one.balance is not None):
        work = [one.work if one.balance is balance else 0 for one in wholes]
        layout = balance.place(layout, work, ranks)
    return layout
