"""One step of Adam on flat local tensors: the reference in torch operators, and the C++ one.

Note: both compute the same bits, on every device and however elements are distributed over ranks.
Hence one rounding per operation: no operator that may be fused to a multiply-add (`addcmul`,
`lerp`, `add` with `alpha`), and no division by a number, which some devices replace by a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import torch

from fsdp.optim import _core
from fsdp.optim.adam8bit.quantization import CodeBook, QuantizedBlocks, dequantize, quantize

__all__ = ["AdamCoefficients", "Moments", "update", "update_many"]


@dataclass(frozen=True, eq=False)
class AdamCoefficients:
    """The numbers of one step, each rounded to fp32 where it is used.

    Attributes:
        beta1, one_minus_beta1: factors of the first moment and of the gradient in it.
        beta2, one_minus_beta2: factors of the second moment and of the squared gradient in it.
        step_size: learning rate, corrected for the bias of the first moment.
        inv_bias_correction2_sqrt: corrects the square root of the second moment for its bias.
        eps: is added to that root.
        param_decay: factor of the parameter; 1 without decoupled weight decay.
        l2_factor: factor of the parameter in the gradient; 0 with decoupled weight decay.
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    inv_bias_correction2_sqrt: float
    eps: float
    param_decay: float
    l2_factor: float

    @classmethod
    def of_step(
        cls,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        decoupled: bool,
    ) -> AdamCoefficients:
        """Returns the coefficients of a step, the first of which is 1."""
        beta1, beta2 = betas
        return cls(
            beta1, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step), eps,
            1 - lr * weight_decay if decoupled else 1.0, 0.0 if decoupled else weight_decay,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Moments:
    """The moments of a parameter's elements on this rank.

    Attributes:
        first: codes, (n,) uint8; or the moment itself, (n,) fp32.
        first_scales: (blocks,) fp32; None if the moment is not quantized.
        second: as `first`.
        second_scales: as `first_scales`.
        block_size: elements per block.
    """

    first: torch.Tensor
    first_scales: torch.Tensor | None
    second: torch.Tensor
    second_scales: torch.Tensor | None
    block_size: int


def update(param: torch.Tensor, grad: torch.Tensor, moments: Moments, c: AdamCoefficients) -> None:
    """Updates a parameter and its moments in place; the reference of `update_many`.

    Args:
        param: fp32, contiguous.
        grad: fp32, contiguous.
        moments: the parameter's.
        c: coefficients of the step.
    """
    param, grad = param.view(-1), grad.view(-1)
    if c.l2_factor:
        grad = grad + param * c.l2_factor
    block_size = moments.block_size
    first, second = moments.first, moments.second
    if moments.first_scales is not None and moments.second_scales is not None:
        first = dequantize(
            QuantizedBlocks(first, moments.first_scales), block_size, CodeBook.SIGNED
        )
        second = dequantize(
            QuantizedBlocks(second, moments.second_scales), block_size, CodeBook.UNSIGNED
        )
    first = first * c.beta1 + grad * c.one_minus_beta1
    second = second * c.beta2 + (grad * grad) * c.one_minus_beta2
    denominator = _sqrt(second) * c.inv_bias_correction2_sqrt + c.eps
    param.copy_(param * c.param_decay - (first * c.step_size) / denominator)
    _store(first, moments.first, moments.first_scales, block_size, CodeBook.SIGNED)
    _store(second, moments.second, moments.second_scales, block_size, CodeBook.UNSIGNED)


def update_many(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    moments: Sequence[Moments],
    coefficients: AdamCoefficients,
) -> list[int]:
    """Updates parameters and moments in place in C++, in one pass over the memory of each.

    It uses as many threads as torch does, and computes the same bits as `update`.

    Args:
        params: fp32, contiguous, on the CPU.
        grads: of the same number, sizes, dtype and device.
        moments: of the same number and sizes, all with one block size.
        coefficients: coefficients of the step.

    Returns:
        The indices of the parameters that have a block that is not finite.
    """
    local_params = []
    for param, grad, m in zip(params, grads, moments, strict=True):
        count = param.numel()
        assert param.is_contiguous()
        assert grad.is_contiguous()
        assert grad.numel() == m.first.numel() == m.second.numel() == count
        local_params.append(
            (
                param.data_ptr(), grad.data_ptr(),
                m.first.data_ptr(), 0 if m.first_scales is None else m.first_scales.data_ptr(),
                m.second.data_ptr(), 0 if m.second_scales is None else m.second_scales.data_ptr(),
                count,
            )
        )  # fmt: skip
    return _core.step(
        local_params, _core.Coefficients(*astuple(coefficients)), moments[0].block_size,
        _core_table(CodeBook.SIGNED), _core_table(CodeBook.UNSIGNED), torch.get_num_threads(),
    )  # fmt: skip


@lru_cache
def _core_table(book: CodeBook) -> _core.CodeBookTable:
    cpu = torch.device("cpu")
    return _core.CodeBookTable(book.values(cpu).tolist(), book.boundaries(cpu).tolist(), book.zero)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded square root; torch's on the CPU, MKL's, is not always."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def _store(
    values: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    block_size: int,
    book: CodeBook,
) -> None:
    if scales is None:
        out.copy_(values)
        return
    quantized = quantize(values, block_size, book)
    out.copy_(quantized.codes)
    scales.copy_(quantized.scales)
