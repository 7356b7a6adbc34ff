"""Block-wise 8-bit quantization: each block of elements has one scale, each element one code.

Note: terminology.
    code book: 256 values between -1 (or 0) and 1; a code is the index of a value. The values are
        those of dynamic quantization: E zero bits encode a factor of 10**-E, a one bit ends them,
        and the remaining bits divide 0.1 to 1 evenly. Large values thus have a short exponent and
        a long fraction, small values the opposite.
    block: consecutive elements that share a scale, which is their largest magnitude. The last block
        of a tensor may be shorter.
    boundary: the midpoint of two neighbouring values of the code book.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), sections 2.1 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache

import torch

__all__ = ["CodeBook", "QuantizedBlocks", "block_count", "dequantize", "quantize"]

_EXPONENTS = 7  # 10**0 to 10**-6
TINY = torch.finfo(torch.float32).tiny  # the reciprocal of a smaller number overflows


class CodeBook(Enum):
    """The values that codes represent.

    Both code books contain 0 and 1. SIGNED contains the negatives of all other values, hence not
    -1. UNSIGNED has one more bit of fraction in place of the sign.
    """

    SIGNED = "signed"
    UNSIGNED = "unsigned"

    @property
    def zero(self) -> int:
        """The code of 0; the i-th positive value has ``zero + i``, its negative ``zero - i``."""
        return 127 if self is CodeBook.SIGNED else 0

    def values(self, device: torch.device) -> torch.Tensor:
        """Returns the value of each code, ascending: (256,) fp32."""
        return _values(self, device)

    def boundaries(self, device: torch.device) -> torch.Tensor:
        """Returns the boundaries between the values from 0 up: (128,) or (255,) fp32."""
        return _boundaries(self, device)


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """The codes of the elements and the scales of their blocks.

    Attributes:
        codes: (n,) uint8.
        scales: (blocks,) fp32; 0 if all elements of the block are below 2**-126, NaN if one of them
            is not finite, so that the whole block becomes NaN.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def block_count(numel: int, block_size: int) -> int:
    """Returns the number of blocks, of which the last may be shorter."""
    return -(-numel // block_size)


def quantize(values: torch.Tensor, block_size: int, book: CodeBook) -> QuantizedBlocks:
    """Rounds each element to the nearest value of the code book, and ties to the smaller magnitude.

    Args:
        values: (n,) fp32, not negative if the code book is unsigned.
        block_size: elements per block.
        book: the values that codes represent.
    """
    count = values.numel()
    padding = block_count(count, block_size) * block_size - count
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, block_size)
    largest = blocks.abs().amax(1)
    usable = (largest >= TINY) & largest.isfinite()
    scales = torch.where(usable, largest, torch.where(largest < TINY, 0.0, torch.nan))
    inverse = torch.where(usable, largest, 1.0).reciprocal()
    units = torch.where(usable[:, None], blocks * inverse[:, None], 0.0).view(-1)[:count]
    codes = torch.bucketize(units.abs(), book.boundaries(values.device), out_int32=True)
    if book is CodeBook.SIGNED:
        codes = torch.where(units < 0, -codes.clamp(max=book.zero), codes) + book.zero
    return QuantizedBlocks(codes.to(torch.uint8), scales)


def dequantize(quantized: QuantizedBlocks, block_size: int, book: CodeBook) -> torch.Tensor:
    """Returns the elements: (n,) fp32."""
    codes = quantized.codes
    scales = quantized.scales.repeat_interleave(block_size)[: codes.numel()]
    return book.values(codes.device)[codes.int()] * scales


def _magnitudes(book: CodeBook) -> list[Fraction]:
    """Returns the exact values of a code book from 0 up."""
    extra_bits = 0 if book is CodeBook.SIGNED else 1  # UNSIGNED needs no sign bit
    magnitudes = {Fraction(0), Fraction(1)}
    for zeros in range(_EXPONENTS):
        steps = 2 ** (_EXPONENTS - 1 - zeros + extra_bits)
        width = Fraction(9, 10) / steps
        for i in range(steps):
            magnitudes.add((Fraction(1, 10) + (i + Fraction(1, 2)) * width) / 10**zeros)
    return sorted(magnitudes)


@lru_cache
def _values(book: CodeBook, device: torch.device) -> torch.Tensor:
    positive = [float(value) for value in _magnitudes(book)]
    negative = [-value for value in reversed(positive[1:-1])]
    signed = book is CodeBook.SIGNED
    values = negative + positive if signed else positive
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache
def _boundaries(book: CodeBook, device: torch.device) -> torch.Tensor:
    positive = book.values(torch.device("cpu"))[book.zero :].double()
    return ((positive[:-1] + positive[1:]) / 2).float().to(device)
