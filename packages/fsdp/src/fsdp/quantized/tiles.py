"""Tiles of matrices, each with one scale and a byte per element.

Note: the terms of this module.
    tile: `rows` x `cols` elements of a matrix that share a scale; those at the lower and the right
        edge may be smaller. The last two dims of a tensor are its matrices, as of experts, and no
        tile is in two of them.
    code: one byte per element: the element divided by its tile's scale, rounded.
    scale: fp32, the largest magnitude of a tile divided by the largest code.
    strip: a row of tiles.

Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, where weights have tiles of 128 x 128.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

__all__ = ["Quantized", "Tiles", "dequantize", "dequantize_into", "quantize"]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = torch.finfo(torch.float32).tiny  # a smaller scale would have few bits, or none


@dataclass(frozen=True)
class Tiles:
    """The form in which a weight is quantized; a ``quantize_fn`` returns it.

    Attributes:
        dtype: of the codes: torch.int8, evenly spaced, or torch.float8_e4m3fn.
        rows: of a tile; more than a matrix has mean its own number.
        cols: of a tile; more than a matrix has mean its own number.

    Raises:
        ValueError: another dtype; a number below 1.
    """

    dtype: torch.dtype = torch.int8
    rows: int = 128
    cols: int = 128

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.dtype not in LARGEST:
            raise ValueError(f"Tiles: dtype: expected one of {[*LARGEST]}, got {self.dtype!r}")
        for key in ("rows", "cols"):
            size = getattr(self, key)
            if not isinstance(size, SupportsIndex) or operator.index(size) < 1:
                raise ValueError(f"Tiles: {key}: expected an integer of at least 1, got {size!r}")
            object.__setattr__(self, key, operator.index(size))

    def block(self, shape: Sequence[int]) -> int:
        """Returns the elements of a block of the flattened tensor that consists of whole tiles.

        It is a strip, or a matrix of a stack whose rows are no multiple of a tile's.
        """
        rows = shape[-2] if _by_matrix(shape, self) else self.rows
        return max(1, min(rows * shape[-1], math.prod(shape)))

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a tensor's scales: matrices, strips, tiles in a strip."""
        return (*shape[:-2], -(-shape[-2] // self.rows), -(-shape[-1] // self.cols))

    def matrices(self, numel: int, shape: Sequence[int]) -> tuple[int, int, int]:
        """Returns the shape, as a stack of matrices, of a part that begins and ends at blocks.

        Args:
            numel: elements of the part, at least one.
            shape: of the tensor.
        """
        rows = shape[-2] if _by_matrix(shape, self) else numel // shape[-1]
        return numel // (rows * shape[-1]), rows, shape[-1]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor: codes of its elements, and scales of its tiles.

    Attributes:
        codes: of the tensor's shape, int8 or float8_e4m3fn.
        scales: of the shape `Tiles.grid`, fp32; 0 where all elements are below the largest code
            times 2**-126, and NaN where one is not finite: the tile is dequantized to NaN then.
    """

    codes: torch.Tensor
    scales: torch.Tensor


@torch.no_grad()
def quantize(weight: torch.Tensor, tiles: Tiles) -> Quantized:
    """Quantizes a tensor to the nearest codes, ties to even.

    The error of an element x of a tile of scale s is at most s / 2 as int8, and at most
    max(abs(x) / 16, s / 1024) as float8_e4m3fn, plus fp32 rounding.

    Args:
        weight: of at least two dims, floating point.
        tiles: dtype of the codes, and sizes.
    """
    codes = torch.empty(weight.shape, dtype=tiles.dtype, device=weight.device)
    grid = tiles.grid(weight.shape)
    if not weight.numel():
        return Quantized(codes, torch.zeros(grid, device=weight.device))
    strips = _strips(_stack(weight), tiles.rows)
    # (m, strips, C); abs() of the whole tensor would need a temporary of its size
    largest = torch.cat([torch.maximum(s.amax(2), -s.amin(2)) for s in strips], 1).float()
    padded = torch.nn.functional.pad(largest, (0, -weight.shape[-1] % tiles.cols))
    scales = padded.unflatten(-1, (-1, tiles.cols)).amax(-1) / LARGEST[tiles.dtype]
    scales = torch.where(scales < TINY, 0.0, torch.where(scales.isfinite(), scales, torch.nan))
    divisors = _per_column(torch.where(scales == 0, torch.inf, scales), weight.shape[-1], tiles)
    first = 0
    for strip, target in zip(strips, _strips(_stack(codes), tiles.rows), strict=True):
        last = first + strip.shape[1]
        # A quotient exceeds the largest code by a rounding error at most, so there is no clamp.
        units = strip / divisors[:, first:last, None]
        if tiles.dtype is torch.int8:
            units.round_()
        target.copy_(units)
        first = last
    return Quantized(codes, scales.view(grid))


@torch.no_grad()
def dequantize(
    quantized: Quantized, tiles: Tiles, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns codes times scales: the weight that modules compute with.

    Args:
        quantized: by `quantize`.
        tiles: that it was quantized with.
        dtype: of the result, to which the fp32 product is rounded.
    """
    weight = torch.empty(quantized.codes.shape, dtype=dtype, device=quantized.codes.device)
    dequantize_into(weight, quantized, tiles)
    return weight


@torch.no_grad()
def dequantize_into(out: torch.Tensor, quantized: Quantized, tiles: Tiles) -> None:
    """Dequantizes into a contiguous tensor of the codes' shape."""
    if not out.numel():
        return
    _decode_into(out, quantized.codes)
    factors, first = _per_column(_stack(quantized.scales), out.shape[-1], tiles), 0
    for strip in _strips(_stack(out), tiles.rows):
        last = first + strip.shape[1]
        strip.mul_(factors[:, first:last, None])
        first = last


def _decode_into(out: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes the values of codes, which every compute dtype represents exactly."""
    if codes.dtype is torch.int8 or codes.device.type != "cpu":
        out.copy_(codes)
    else:  # a table look-up is about seven times as fast as the host's cast
        values = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(out.dtype)
        torch.index_select(values, 0, codes.view(torch.uint8).view(-1).int(), out=out.view(-1))


def _by_matrix(shape: Sequence[int], tiles: Tiles) -> bool:
    """Returns whether a stack has matrices that are not whole strips, so strips restart in each."""
    return len(shape) > 2 and shape[-2] % tiles.rows != 0


def _stack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


def _strips(matrices: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Returns views (m, strips, rows, C): of the full strips, and of a shorter last one."""
    whole = matrices.shape[1] // rows
    found = []
    if whole:
        found.append(matrices[:, : whole * rows].unflatten(1, (whole, rows)))
    if matrices.shape[1] % rows:
        found.append(matrices[:, whole * rows :].unsqueeze(1))
    return found


def _per_column(scales: torch.Tensor, cols: int, tiles: Tiles) -> torch.Tensor:
    """Returns the scale of each column of each strip: (m, strips, C)."""
    return scales.repeat_interleave(tiles.cols, -1)[..., :cols]
