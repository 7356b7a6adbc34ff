"""Casts as `torch.autocast` does, for functions that are replaced above the operators it casts."""

from __future__ import annotations

from typing import TypeVar, cast

import torch

__all__ = ["cast_down", "cast_up"]

_T = TypeVar("_T", bound=torch.Tensor)
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def cast_down(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts tensors to the dtype of autocast, which attention and products are computed in.

    Returns:
        the same tensors without autocast; it leaves those of float64 and of integers.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(one.to(dtype) if one.dtype in _CAST else one for one in tensors)


def cast_up(tensor: _T) -> _T:
    """Casts a tensor to float32 under autocast, which losses are computed in."""
    if torch.is_autocast_enabled(tensor.device.type) and tensor.dtype in _CAST:
        return cast(_T, tensor.float())
    return tensor
