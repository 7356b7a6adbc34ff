"""``param.grad_dtype`` of torch 2.15: which dtypes the gradients of a parameter have.

Note: the dtypes of one gradient; ``reduce_dtype`` is that of the mixed precision policy.

    ====================  ===================================  ======================
    ``grad_dtype``        reduced in, without a reduce_dtype   of the sharded gradient
    ====================  ===================================  ======================
    not set               the sharded parameter's dtype        the sharded parameter's
    a dtype               this dtype                           this dtype
    None                  the dtype that autograd computes     that of the reduction
    ====================  ===================================  ======================

    A group whose parameters differ is reduced in the dtype that all of these promote to. Torch
    before 2.15 sets none, and FSDP2 does not read it there.

Source: torch 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_param_group.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate

from fsdp._compat import default_reduce_dtype
from fsdp.param import FSDPParam

__all__ = ["grads_of_own_dtype", "promoted", "reduce_dtype_of", "set_unsharded_grad_dtypes"]


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype that holds all of at least one; float8 promotes with itself alone."""
    return functools.reduce(torch.promote_types, dict.fromkeys(dtypes))


def reduce_dtype_of(
    params: Iterable[FSDPParam],
    sharded: torch.dtype,
    compute: torch.dtype,
    policy: MixedPrecisionPolicy,
) -> torch.dtype:
    """Returns the dtype in which the gradients of a group are reduced.

    It is a lower bound for parameters that `FSDPParam.follows_grad`.

    Args:
        params: of the group.
        sharded: dtype of the sharded parameters.
        compute: dtype of the unsharded parameters.
        policy: of the group.
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    default = default_reduce_dtype(sharded, compute)
    own = [default if p.grad_dtype is None else p.grad_dtype.dtype for p in params]
    return promoted([dtype for dtype in own if dtype is not None] or [compute])


def set_unsharded_grad_dtypes(
    params: Iterable[FSDPParam],
    sharded: torch.dtype,
    compute: torch.dtype,
    policy: MixedPrecisionPolicy,
) -> None:
    """Sets, for the parameters of a group, the dtypes that autograd gives unsharded gradients.

    Where that is wider than the compute dtype, autograd does not cast: the copy into the buffer
    does. Gradients that other axes than those of fully_shard may still reduce are cast, so that
    this is done in the wider dtype, too.

    Args:
        params: of the group.
        sharded: dtype of the sharded parameters.
        compute: dtype of the unsharded parameters.
        policy: of the group.
    """
    for param in params:
        own = sharded if param.grad_dtype is None else param.grad_dtype.dtype
        dtype = policy.reduce_dtype or own
        param.follows_grad = dtype is None
        if dtype is not None and _is_wider(dtype, compute) and not _is_reduced_elsewhere(param):
            dtype = None
        param.set_unsharded_grad_dtype(dtype)


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    floats = dtype.is_floating_point and other.is_floating_point
    return floats and dtype.itemsize > other.itemsize


def _is_reduced_elsewhere(param: FSDPParam) -> bool:
    """Returns whether a gradient may be Partial on an axis that fully_shard does not reduce."""
    placement = param.placement
    if placement is None:
        return False
    if placement.grad_spec is not None:
        return any(
            one.is_partial() and axis not in placement.fsdp_axes
            for axis, one in enumerate(placement.grad_spec.placements)
        )
    return any(
        isinstance(one, Replicate) and axis not in placement.fsdp_axes
        for axis, one in enumerate(placement.spec.placements)
    )


@contextmanager
def grads_of_own_dtype(params: Iterable[FSDPParam]) -> Iterator[None]:
    """Keeps the dtype of gradients that ``grad_dtype`` sets, while a module is cast or moved."""
    grads = {}
    for param in params:
        sharded_param = param.sharded_param
        param.keep_grad_dtype(sharded_param)
        if param.grad_dtype is not None and sharded_param.grad is not None:
            grads[param], sharded_param.grad = sharded_param.grad, None
    yield
    for param, grad in grads.items():
        param.sharded_param.grad = grad.to(param.sharded_param.device)
