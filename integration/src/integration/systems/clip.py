"""Clipping of gradients by their norm, whatever kinds of tensors they are.

As `fsdp.clip_grad_norm_`, without which most systems here run.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(
    parameters: Iterable[nn.Parameter], most: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scales gradients down to a norm of ``most``, if theirs is larger.

    Args:
        parameters: of a model, plain tensors and DTensors of several meshes among them.
        most: the largest 2-norm of all gradients together that is left as it is.
        group: of ranks that have other parameters of the same model, each some; None: there are
            none.

    Returns:
        the norm before, a plain scalar, the same on all ranks.
    """
    # torch's own norm takes tensors of one mesh, or none.
    kinds: dict[object, list[Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            kinds.setdefault(mesh, []).append(param)
    norms = [_norm(same) for same in kinds.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if group is not None:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    for same in kinds.values():
        clip_grads_with_norm_(same, most, norm)
    return norm


def _norm(parameters: Iterable[Tensor]) -> Tensor:
    norm = get_total_norm([param.grad for param in parameters if param.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
