"""Clips gradients of plain tensors and DTensors by their total norm.

It does what `fsdp.clip_grad_norm_` does, for systems that do not use fsdp and for pipelines.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    group: dist.ProcessGroup | None = None,
    *,
    copies: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Clips gradients to the total norm ``max_norm``.

    Args:
        parameters: parameters of a model, plain tensors and DTensors of several meshes.
        max_norm: largest total 2-norm that is not scaled.
        group: process group whose ranks have different parameters of the same model; None if
            there are none.
        copies: those of the parameters that another rank of the group has and counts.

    Returns:
        The total norm before clipping, a plain scalar, the same on all ranks.
    """
    # torch's norm takes tensors of one mesh only.
    by_mesh: dict[object, list[Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    counted = [
        [param for param in of_mesh if not any(param is copy for copy in copies)]
        for of_mesh in by_mesh.values()
    ]
    norms = [_norm(params) for params in counted if params]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if group is not None:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    for of_mesh in by_mesh.values():
        clip_grads_with_norm_(of_mesh, max_norm, norm)
    return norm


def _norm(parameters: Iterable[Tensor]) -> Tensor:
    norm = get_total_norm([param.grad for param in parameters if param.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
