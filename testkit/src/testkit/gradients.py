"""Losses whose backward yields a chosen gradient, which autograd accumulates as any other."""

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
        # A fresh tensor, so that autograd assigns it without a copy: where it has to copy,
        # torch 2.11 reduces a Partial DTensor on the way.
        return ctx.grad.detach(), None


def loss_with_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Makes a loss of value zero whose backward accumulates this gradient into a parameter.

    Args:
        param: a leaf, a plain tensor or a DTensor.
        grad: of the same kind and global shape, with any placements, which are left as they are;
            its memory becomes that of the parameter's gradient.

    Returns:
        A plain tensor without dims; the sum of several is the loss of all of them.
    """
    zero: torch.Tensor = _LossWithGrad.apply(param, grad)  # type: ignore[no-untyped-call]
    return zero
