"""Clips gradients of plain tensors and DTensors by their total norm, that of all stages."""

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
    on_buffers: bool = False,
) -> Tensor:
    """Clips gradients to the total norm ``max_norm``.

    Args:
        parameters: parameters of a model, plain tensors and DTensors of several meshes.
        max_norm: largest total 2-norm that is not scaled.
        group: process group whose ranks have different parameters of the same model; None if
            there are none.
        copies: those of the parameters that another rank of the group has and counts.
        on_buffers: whether gradients are in fsdp's buffers; those of a group are then one tensor.

    Returns:
        The total norm before clipping, a plain scalar, the same on all ranks.
    """
    trained = [param for param in parameters if param.grad is not None]
    counted = [param for param in trained if not any(param is copy for copy in copies)]
    if on_buffers:
        import fsdp

        norm = _over_stages(fsdp.get_total_norm(_gradients(counted)), group)
        fsdp.clip_grads_with_norm_(trained, max_norm, norm)
        return norm
    # torch's functions take tensors of one mesh only.
    norms = [_norm(_gradients(params)) for params in _by_mesh(counted)]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    norm = _over_stages(norm, group)
    for params in _by_mesh(trained):
        clip_grads_with_norm_(params, max_norm, norm)
    return norm


def _by_mesh(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    found: dict[object, list[nn.Parameter]] = {}
    for param in parameters:
        mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
        found.setdefault(mesh, []).append(param)
    return found.values()


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in parameters if param.grad is not None]


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _over_stages(norm: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the norm of the gradients of all ranks of the group together."""
    if group is None:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()
