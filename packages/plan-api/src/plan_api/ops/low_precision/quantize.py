"""Quantizes matrices to float8 with scales per block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from plan_api.ops.low_precision.recipes import Scaling

__all__ = ["Quantized", "amax_of", "quantize", "scales_of"]

# Below it, a tensor of zeros included, elements are rounded to multiples of a fixed scale.
_LEAST_AMAX = 1e-12  # as torchao's EPS (torchao/float8/float8_utils.py)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix.

    Attributes:
        data: (outer, inner), of the scaling's dtype; rows are padded with zeros to whole blocks. It
            is contiguous.
        scales: (blocks of rows, blocks in a row), float32: factors of the elements of ``data``.
        scaling: how it was quantized.
    """

    data: torch.Tensor
    scales: torch.Tensor
    scaling: Scaling

    def transposed(self) -> Quantized:
        """Returns the transpose, if the scaling is square, without quantizing again."""
        assert self.scaling.is_square
        return Quantized(self.data.t().contiguous(), self.scales.t(), self.scaling)

    def dequantized(self) -> torch.Tensor:
        """Returns the matrix in float32."""
        if not self.data.numel():
            return self.data.float()
        blocks = _blocks(self.data, self.scaling).float() * self.scales[:, None, :, None]
        return blocks.reshape(self.data.shape)


def amax_of(matrix: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Returns the largest magnitude of each block, float32 (blocks of rows, blocks in a row)."""
    if not matrix.numel():
        sizes = zip(matrix.shape, (scaling.outer, scaling.inner), strict=True)
        shape = [-(-size // block) if block else 1 for size, block in sizes]
        return matrix.new_zeros(shape, dtype=torch.float32)
    return _blocks(matrix, scaling).abs().amax((1, 3)).float()


def quantize(matrix: torch.Tensor, scaling: Scaling, scales: torch.Tensor) -> Quantized:
    """Quantizes a matrix: rounds elements to nearest, and clamps those out of the dtype's range.

    Args:
        matrix: (outer, inner), floating point; outer is a multiple of the blocks' rows.
        scaling: how.
        scales: of `scales_of`.
    """
    if not matrix.numel():
        return Quantized(matrix.to(scaling.dtype), scales, scaling)
    blocks = _blocks(matrix, scaling)
    largest = torch.finfo(scaling.dtype).max
    # Releases of torch differ in whether a cast makes what is out of range NaN.
    scaled = (blocks.float() / scales[:, None, :, None]).clamp(-largest, largest)
    outer, rows, inner, columns = blocks.shape
    data = scaled.to(scaling.dtype).reshape(outer * rows, inner * columns)
    # Of a transpose it is not: then products, whose order of sums may depend on strides, have
    # other bits than those of an operand that was gathered.
    return Quantized(data.contiguous(), scales, scaling)


def scales_of(amax: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Returns the scale of each block; NaN, or infinite, where its values are not finite.

    Args:
        amax: of `amax_of`, or the largest of several ranks where these share a block.
        scaling: how the block is quantized.
    """
    largest = torch.finfo(scaling.dtype).max
    amax = amax.clamp(min=_LEAST_AMAX)
    if scaling.scales == "float32":
        return amax / largest
    if scaling.scales == "power-of-2":
        mantissa, exponent = torch.frexp(amax / largest)
        exponent = exponent - (mantissa == 0.5).int()  # a power of two is its own
    else:
        exponent = torch.frexp(amax)[1] - math.frexp(largest)[1]
    # By bits: pow and ldexp may round.
    power = ((exponent.clamp(-126, 127) + 127) << 23).to(torch.int32).view(torch.float32)
    return torch.where(amax.isfinite(), power, torch.nan)


def _blocks(matrix: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Returns a matrix as (blocks of rows, rows, blocks in a row, columns)."""
    rows, columns = scaling.outer or matrix.shape[0], scaling.inner or matrix.shape[1]
    missing = -matrix.shape[1] % columns
    if missing:
        matrix = pad(matrix, (0, missing))
    outer, inner = matrix.shape[0] // rows, matrix.shape[1] // columns
    return matrix.reshape(outer, rows, inner, columns)
