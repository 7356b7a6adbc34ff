"""Clipping of gradients by their norm, whatever kinds of tensors they are."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale gradients down to a norm of ``most``, if theirs is larger.

    Args:
        parameters: of a model, plain tensors and DTensors of several meshes among them.
        most: the largest 2-norm of all gradients together that is left as it is.

    Returns:
        the norm before, a plain scalar, the same on all ranks.
    """
    grads = [param.grad for param in parameters if param.grad is not None]
    # torch's own norm takes tensors of one mesh, or none.
    kinds: dict[object, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [_plain(get_total_norm(same)) for same in kinds.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    for same in kinds.values():
        torch._foreach_mul_([_local(grad) for grad in same], scale)
    return norm


def _plain(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
