"""Losses whose backward returns a given gradient, which autograd accumulates."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["loss_with_grad"]


class _LossWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A new tensor, which autograd assigns without a copy: torch 2.11's copy reduces a Partial
        # DTensor.
        return ctx.grad.detach(), None


def loss_with_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Makes a loss of value zero whose backward accumulates this gradient into a parameter.

    Args:
        param: a leaf, a plain tensor or a DTensor.
        grad: of the same type and global shape, with any placements, which do not change; its
            memory becomes the parameter's gradient.

    Returns:
        a plain tensor without dims; the sum of several is the loss of all of them.
    """
    zero: torch.Tensor = _LossWithGrad.apply(param, grad)  # type: ignore[no-untyped-call]
    return zero
