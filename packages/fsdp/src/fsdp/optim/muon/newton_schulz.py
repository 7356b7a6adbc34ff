"""Muon's matrix iteration, and the learning rate that goes with a shape.

It is that of torch/optim/_muon.py, operation by operation, so that the bits are the same; see
https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import math

import torch

__all__ = ["COEFFICIENTS", "Coefficients", "adjusted_lr", "check_adjustment", "newton_schulz"]

Coefficients = tuple[float, float, float]

COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def newton_schulz(
    matrix: torch.Tensor, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """The nearest orthogonal matrix, nearly: all singular values become 0.5 to 1.5.

    Args:
        matrix: of two dims, any float dtype; stays as it is.
        coefficients: of the quintic polynomial.
        steps: how often it is applied.
        eps: the least norm that is divided by.

    Returns:
        bfloat16, of the matrix's shape.
    """
    a, b, c = coefficients
    x = matrix.bfloat16()
    tall = matrix.size(0) > matrix.size(1)
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def adjusted_lr(lr: float, adjustment: str | None, shape: tuple[int, int]) -> float:
    """The learning rate for a matrix of this shape.

    Args:
        lr: of the group.
        adjustment: None and "original" are Keller Jordan's, "match_rms_adamw" is Moonshot's, which
            takes AdamW's learning rates.
        shape: of the matrix.
    """
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))


def work_of(shape: tuple[int, int]) -> int:
    """Multiplications of one step of Newton-Schulz, with n the smaller size and m the other.

    Two products of n x n with n x m, and one of n x n with n x n.
    """
    n, m = sorted(shape)
    return n * n * (2 * m + n)


def check_adjustment(adjustment: str | None) -> None:
    """Raises where there is no such adjustment of the learning rate.

    Raises:
        ValueError: naming it.
    """
    if adjustment not in _ADJUSTMENTS:
        raise ValueError(f"Muon: adjust_lr_fn={adjustment!r}; wants one of {_ADJUSTMENTS}")
