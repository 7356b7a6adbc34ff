"""The norm of all gradients, and clipping by it, where they lie on several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters of any meshes, and plain ones beside them.

    torch's own refuses gradients of several meshes, as experts and the rest have them under expert
    parallelism. Plain tensors count once, so they have to be the same on every rank.

    Args:
        parameters: some of one model, on every rank in the same order.
        max_norm: the largest norm of all gradients together.
        norm_type: ``inf`` for the largest element.
        error_if_nonfinite: whether a norm that is inf or nan is an error.
        foreach: as of torch's.

    Returns:
        The norm before clipping: a plain scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and that is an error.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for param in given:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    norms = []
    for params in by_mesh.values():
        grads = [param.grad for param in params if param.grad is not None]
        norm = get_total_norm(grads, norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for params in by_mesh.values():
        clip_grads_with_norm_(params, max_norm, total, foreach)
    return total
