"""Gradients that are given, not computed, and accumulated by autograd as any other."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["deposit"]


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Nobody else has this one, so that autograd takes it as it is: where it has to copy,
        # torch 2.11 reduces a Partial DTensor on the way.
        return ctx.grad.detach(), None


def deposit(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A zero whose backward gives a parameter this gradient, placed as it is.

    Args:
        param: a leaf, plain or a DTensor.
        grad: of the same kind and global shape; its memory becomes the parameter's gradient.

    Returns:
        a plain tensor without dims; the sum of several is the loss of them all.
    """
    zero: torch.Tensor = _Deposit.apply(param, grad)  # type: ignore[no-untyped-call]
    return zero
