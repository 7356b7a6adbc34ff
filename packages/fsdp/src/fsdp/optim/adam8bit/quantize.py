"""Block-wise 8-bit numbers: runs of elements, each with one scale and a code per element.

Note: the words of this module.
    code book: 256 values between -1 (or 0) and 1; a code is the index of one. They are those of
        dynamic quantisation: E zero bits are a factor of 10**-E, a one bit ends them, and what bits
        remain cut 0.1 to 1 evenly. Few bits go to the exponent of large values and many to their
        fraction, and the other way round for small ones.
    block: a run of elements that share a scale, which is their largest magnitude. The last one of a
        tensor may be short.
    boundary: between two neighbouring codes, half-way.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), sections 2.1 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache

import torch

__all__ = ["CodeBook", "Quantized", "blocks_of", "dequantize", "quantize"]

_EXPONENTS = 7  # 10**0 to 10**-6
TINY = torch.finfo(torch.float32).tiny  # the reciprocal of what is below overflows


class CodeBook(Enum):
    """Which values codes stand for.

    Both hold 0 and 1. SIGNED has the negative of every other one, and so no -1; UNSIGNED has a
    bit more of fraction in place of the sign.
    """

    SIGNED = "signed"
    UNSIGNED = "unsigned"

    @property
    def zero(self) -> int:
        """The code of 0; that of the i-th value above is `zero + i`, of its negative `zero - i`."""
        return 127 if self is CodeBook.SIGNED else 0

    def values(self, device: torch.device) -> torch.Tensor:
        """What the codes stand for, ascending: (256,) fp32."""
        return _values(self, device)

    def boundaries(self, device: torch.device) -> torch.Tensor:
        """Those between values from 0 up: (128,) or (255,) fp32."""
        return _boundaries(self, device)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes of elements and scales of their blocks.

    Attributes:
        codes: (n,) uint8.
        scales: (blocks,) fp32; 0 where all elements are below 2**-126, and NaN where one is not
            finite, so that the whole block becomes NaN.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def blocks_of(numel: int, block_size: int) -> int:
    """How many blocks there are, the last of which may be short."""
    return -(-numel // block_size)


def quantize(values: torch.Tensor, block_size: int, book: CodeBook) -> Quantized:
    """The nearest code of every element; of two that are as near, that of the smaller magnitude.

    Args:
        values: (n,) fp32, not below 0 if the book is unsigned.
        block_size: elements of a block.
        book: what the codes stand for.
    """
    count = values.numel()
    padding = blocks_of(count, block_size) * block_size - count
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, block_size)
    largest = blocks.abs().amax(1)
    usable = (largest >= TINY) & largest.isfinite()
    scales = torch.where(usable, largest, torch.where(largest < TINY, 0.0, torch.nan))
    inverse = torch.where(usable, largest, 1.0).reciprocal()
    units = torch.where(usable[:, None], blocks * inverse[:, None], 0.0).view(-1)[:count]
    above = torch.bucketize(units.abs(), book.boundaries(values.device), out_int32=True)
    if book is CodeBook.SIGNED:
        above = torch.where(units < 0, -above.clamp(max=book.zero), above) + book.zero
    return Quantized(above.to(torch.uint8), scales)


def dequantize(quantized: Quantized, block_size: int, book: CodeBook) -> torch.Tensor:
    """The elements: (n,) fp32."""
    codes = quantized.codes
    scales = quantized.scales.repeat_interleave(block_size)[: codes.numel()]
    return book.values(codes.device)[codes.int()] * scales


def _magnitudes(book: CodeBook) -> list[Fraction]:
    """The values of a book from 0 up, exactly."""
    spare = 0 if book is CodeBook.SIGNED else 1  # the bit that is no sign
    found = {Fraction(0), Fraction(1)}
    for zeros in range(_EXPONENTS):
        steps = 2 ** (_EXPONENTS - 1 - zeros + spare)
        width = Fraction(9, 10) / steps
        for i in range(steps):
            found.add((Fraction(1, 10) + (i + Fraction(1, 2)) * width) / 10**zeros)
    return sorted(found)


@lru_cache
def _values(book: CodeBook, device: torch.device) -> torch.Tensor:
    positive = [float(value) for value in _magnitudes(book)]
    negative = [-value for value in reversed(positive[1:-1])]
    signed = book is CodeBook.SIGNED
    held = negative + positive if signed else positive
    return torch.tensor(held, dtype=torch.float32, device=device)


@lru_cache
def _boundaries(book: CodeBook, device: torch.device) -> torch.Tensor:
    positive = book.values(torch.device("cpu"))[book.zero :].double()
    return ((positive[:-1] + positive[1:]) / 2).float().to(device)
