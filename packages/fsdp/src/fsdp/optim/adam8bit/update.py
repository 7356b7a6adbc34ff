"""One step of Adam on flat local tensors: what it computes, in torch's operators.

Note: the same bits on every device and however elements are spread over ranks. So there is one
rounding per operation, no operator that may become a multiply-add (`addcmul`, `lerp`, `add` with
`alpha`), and no division by a number, which some devices make a product of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsdp.optim.adam8bit.quantize import CodeBook, Quantized, dequantize, quantize

__all__ = ["Coefficients", "Moments", "update"]


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The numbers of one step, each rounded to fp32 where it is used.

    Attributes:
        beta1, rest1: of the first moment and of the gradient in it.
        beta2, rest2: of the second.
        size: of the step, corrected for the first moment's bias.
        root: corrects the square root of the second for its bias.
        eps: added to it.
        decay: that the parameter is multiplied by.
        coupled: of the parameter in the gradient; 0 for decoupled weight decay.
    """

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    size: float
    root: float
    eps: float
    decay: float
    coupled: float

    @classmethod
    def of(
        cls,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        decoupled: bool,
    ) -> Coefficients:
        """Those of the step of this number, from 1 on."""
        beta1, beta2 = betas
        return cls(
            beta1, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step), eps,
            1 - lr * weight_decay if decoupled else 1.0, 0.0 if decoupled else weight_decay,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Moments:
    """The state of a parameter's elements on this rank.

    Attributes:
        first: codes, (n,) uint8; or the moment itself, fp32.
        first_scales: (blocks,) fp32; None of a moment that is not quantised.
        second: as `first`.
        second_scales: as `first_scales`.
        block_size: elements of a block.
    """

    first: torch.Tensor
    first_scales: torch.Tensor | None
    second: torch.Tensor
    second_scales: torch.Tensor | None
    block_size: int


def update(param: torch.Tensor, grad: torch.Tensor, moments: Moments, c: Coefficients) -> None:
    """Steps in place.

    Args:
        param: fp32, contiguous.
        grad: fp32, contiguous.
        moments: of them.
        c: of the step.
    """
    param, grad = param.view(-1), grad.view(-1)
    if c.coupled:
        grad = grad + param * c.coupled
    size = moments.block_size
    first, second = moments.first, moments.second
    if moments.first_scales is not None and moments.second_scales is not None:
        first = dequantize(Quantized(first, moments.first_scales), size, CodeBook.SIGNED)
        second = dequantize(Quantized(second, moments.second_scales), size, CodeBook.UNSIGNED)
    first = first * c.beta1 + grad * c.rest1
    second = second * c.beta2 + (grad * grad) * c.rest2
    param.copy_(param * c.decay - (first * c.size) / (_root(second) * c.root + c.eps))
    _store(first, moments.first, moments.first_scales, size, CodeBook.SIGNED)
    _store(second, moments.second, moments.second_scales, size, CodeBook.UNSIGNED)


def _root(values: torch.Tensor) -> torch.Tensor:
    """The square root, rounded to nearest: torch's on the CPU is MKL's, which is not always."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def _store(
    values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, size: int, book: CodeBook
) -> None:
    if scales is None:
        out.copy_(values)
        return
    quantized = quantize(values, size, book)
    out.copy_(quantized.codes)
    scales.copy_(quantized.scales)
