"""Steps on the CPU, by the compiled core: one pass over the memory of each parameter.

`update` is its reference: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache

import torch

from fsdp.optim import _core
from fsdp.optim.adam8bit.quantize import CodeBook
from fsdp.optim.adam8bit.update import Coefficients, Moments

__all__ = ["update_many"]


def update_many(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    moments: Sequence[Moments],
    coefficients: Coefficients,
) -> list[int]:
    """Steps in place, on as many threads as torch has.

    Args:
        params: fp32, contiguous, on the CPU.
        grads: as many, likewise, of the same sizes.
        moments: as many, of one block size.
        coefficients: of the step.

    Returns:
        Which of them have a block that is not finite.
    """
    jobs = []
    for param, grad, m in zip(params, grads, moments, strict=True):
        count = param.numel()
        assert param.is_contiguous()
        assert grad.is_contiguous()
        assert grad.numel() == m.first.numel() == m.second.numel() == count
        jobs.append(
            (
                param.data_ptr(), grad.data_ptr(),
                m.first.data_ptr(), 0 if m.first_scales is None else m.first_scales.data_ptr(),
                m.second.data_ptr(), 0 if m.second_scales is None else m.second_scales.data_ptr(),
                count,
            )
        )  # fmt: skip
    return _core.step(
        jobs, _core.Coefficients(*astuple(coefficients)), moments[0].block_size,
        _book(CodeBook.SIGNED), _book(CodeBook.UNSIGNED), torch.get_num_threads(),
    )  # fmt: skip


@lru_cache
def _book(book: CodeBook) -> _core.Book:
    cpu = torch.device("cpu")
    return _core.Book(book.values(cpu).tolist(), book.boundaries(cpu).tolist(), book.zero)
