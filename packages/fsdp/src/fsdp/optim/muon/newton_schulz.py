"""Muon's Newton-Schulz iteration, its cost, and the learning rate adjusted to a matrix's shape.

It does the operations of torch/optim/_muon.py in the same order, so the bits are the same; see also
https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

__all__ = [
    "COEFFICIENTS", "NsCoefficients", "adjusted_lr", "check_lr_adjustment", "newton_schulz",
    "newton_schulz_cost",
]  # fmt: skip

NsCoefficients: TypeAlias = tuple[float, float, float]

COEFFICIENTS: NsCoefficients = (3.4445, -4.7750, 2.0315)
_LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def newton_schulz(
    matrix: torch.Tensor, coefficients: NsCoefficients, steps: int, eps: float
) -> torch.Tensor:
    """Approximates the nearest orthogonal matrix: all singular values become 0.5 to 1.5.

    Args:
        matrix: two dims, any float dtype; it is not changed.
        coefficients: of the quintic polynomial.
        steps: number of applications of the polynomial.
        eps: lower bound of the norm that the matrix is divided by.

    Returns:
        A bfloat16 tensor of the matrix's shape.
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
    """Returns the learning rate for a matrix of this shape, in float64 as torch does.

    Args:
        lr: learning rate of the group.
        adjustment: None and "original" multiply by ``max(1, rows / columns) ** 0.5``, which is
            Keller Jordan's (https://kellerjordan.github.io/posts/muon/). "match_rms_adamw"
            multiplies by ``0.2 * max(rows, columns) ** 0.5``, so that updates have the root mean
            square of AdamW's and take its learning rates; it is Moonlight's (Liu et al., arXiv
            2502.16982, section 2.2).
        shape: rows and columns of the matrix.

    Source: ``_adjust_lr`` in torch/optim/_muon.py.
    """
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def newton_schulz_cost(shape: tuple[int, int]) -> int:
    """Returns the multiplications of one Newton-Schulz step on a matrix of this shape.

    With n the smaller size and m the larger one, a step is two products of n x n with n x m and one
    of n x n with n x n.
    """
    n, m = sorted(shape)
    return n * n * (2 * m + n)


def check_lr_adjustment(adjustment: str | None) -> None:
    """Checks the name of a learning rate adjustment.

    Raises:
        ValueError: there is no adjustment of this name.
    """
    if adjustment not in _LR_ADJUSTMENTS:
        raise ValueError(
            f"Muon: expected adjust_lr_fn to be one of {_LR_ADJUSTMENTS}, got {adjustment!r}"
        )
