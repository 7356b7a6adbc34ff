"""Quantized matrices are within half a step of the matrix, with the scales of their recipes."""

import math

import pytest
import torch

from plan_api.ops.low_precision.quantize import amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
    Scaling,
)

E4M3 = torch.float8_e4m3fn
SCALINGS = {
    "tensorwise": Float8Tensorwise().output.left,
    "tensorwise gradient": Float8Tensorwise().grad_input.left,
    "rowwise": Float8Rowwise().output.left,
    "1 x 8": Float8Block(block=8).output.left,
    "8 x 8": Float8Block(block=8).output.right,
    "mx": MXFP8().output.left,
}
of_all_scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)


def quantized(matrix, scaling):
    return quantize(matrix, scaling, scales_of(amax_of(matrix, scaling), scaling))


def scale_of(amax, scaling):
    """The scale of one block, in Python's float64."""
    largest = torch.finfo(scaling.dtype).max
    if scaling.scales == "float32":
        return amax / largest
    if scaling.scales == "power-of-2":
        return 2.0 ** math.ceil(math.log2(amax / largest))
    return 2.0 ** (math.floor(math.log2(amax)) - math.floor(math.log2(largest)))


@of_all_scalings
def test_each_block_has_the_scale_of_its_largest_magnitude(scaling):
    matrix = torch.randn(16, 64) * torch.logspace(-6, 6, 64)
    found = quantized(matrix, scaling)
    rows, columns = scaling.outer or 16, scaling.inner or 64
    assert found.scales.shape == (16 // rows, 64 // columns)
    for i, j in torch.cartesian_prod(*map(torch.arange, found.scales.shape)).tolist():
        block = matrix[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].double()
        expected = scale_of(block.abs().max().item(), scaling)
        assert found.scales[i, j].item() == pytest.approx(expected, rel=2**-23)
        scale, at = found.scales[i, j].double(), (slice(i * rows, None), slice(j * columns, None))
        inside = found.data[at][:rows, :columns].double()
        largest = torch.finfo(scaling.dtype).max
        scaled = (block / scale).clamp(-largest, largest)
        # Half of the last place, of normal numbers and of those below them.
        bits, least = (3, -6) if scaling.dtype == E4M3 else (2, -14)
        place = 2.0 ** (scaled.abs().clamp(min=2.0**least).log2().floor() - bits)
        assert ((inside - scaled).abs() <= place / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("amax", [448.0, 449.0, 224.0, 1.0, 511.0, 2.0**-30, 3e5])
def test_powers_of_two_are_exact_at_the_ends_of_their_range(amax):
    matrix = torch.tensor([[amax, -amax / 3]])
    for scaling in (SCALINGS["rowwise"], SCALINGS["mx"]):
        assert quantized(matrix, scaling).scales.item() == scale_of(amax, scaling)


def test_rowwise_never_clamps_and_mx_does():
    matrix = torch.tensor([[500.0, 1.0]])  # of a block of up to 512 the MX scale is 1
    assert quantized(matrix, SCALINGS["rowwise"]).dequantized()[0, 0] == 512
    assert quantized(matrix, SCALINGS["mx"]).dequantized()[0, 0] == 448


@of_all_scalings
def test_zeros_stay_zeros(scaling):
    found = quantized(torch.zeros(16, 64), scaling)
    assert torch.equal(found.dequantized(), torch.zeros(16, 64))


@of_all_scalings
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(scaling, value):
    matrix = torch.ones(16, 64)
    matrix[3, 5] = value
    assert not quantized(matrix, scaling).dequantized()[3, 5].isfinite()


def test_the_last_block_of_a_row_is_padded_with_zeros():
    matrix = torch.randn(4, 10)
    found = quantized(matrix, Scaling(1, 8))
    first, last = quantized(matrix[:, :8], Scaling(1, 8)), quantized(matrix[:, 8:], Scaling(1, 2))
    parts = [first.dequantized(), last.dequantized(), torch.zeros(4, 6)]
    assert torch.equal(found.dequantized(), torch.cat(parts, 1))


@pytest.mark.parametrize("name", ["tensorwise", "8 x 8"])
def test_the_transpose_of_square_blocks_is_the_quantized_transpose(name):
    matrix, scaling = torch.randn(16, 64), SCALINGS[name]
    transposed = quantized(matrix, scaling).transposed()
    again = quantized(matrix.t(), scaling)
    assert torch.equal(transposed.data.float(), again.data.float())
    assert torch.equal(transposed.scales, again.scales)


@of_all_scalings
def test_no_rows_are_quantized_to_no_rows(scaling):
    rows = scaling.outer if scaling.outer and scaling.outer > 1 else 0
    found = quantized(torch.zeros(rows, 64)[:0], scaling)
    assert found.dequantized().shape[0] == 0


@pytest.mark.parametrize("scaling", [Scaling(1, None), Scaling(1, 32), Scaling(32, 32)])
def test_a_quantized_transpose_is_contiguous(scaling):
    """So that products of it sum in the order of those of an operand that ranks have gathered."""
    matrix = torch.arange(64.0 * 32).view(64, 32).t()
    found = quantize(matrix, scaling, scales_of(amax_of(matrix, scaling), scaling))
    assert found.data.is_contiguous()
