"""Block-wise quantization: code books, nearest codes, error bounds, blocks that are not finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.optim.adam8bit.quantization import (
    TINY,
    CodeBook,
    QuantizedBlocks,
    block_count,
    dequantize,
    quantize,
)

CPU = torch.device("cpu")
BOOKS = pytest.mark.parametrize("book", CodeBook, ids=lambda book: book.value)


def roundtrip(values, block_size, book):
    return dequantize(quantize(values, block_size, book), block_size, book)


def paper_code_book(signed):
    """Builds the dynamic data type of the paper from bits: sign, zeros, a one, a fraction."""
    found = set()
    for code in range(256):
        bits = f"{code:08b}"
        negative, bits = (bits[0] == "1", bits[1:]) if signed else (False, bits)
        most = 7
        zeros = len(bits) - len(bits.lstrip("0"))
        if zeros >= most:
            found.add(1.0 if (negative or (not signed and code)) else 0.0)
            continue
        rest = bits[zeros + 1 :]
        steps = 2 ** len(rest)
        fraction = 0.1 + 0.9 * ((int(rest, 2) if rest else 0) + 0.5) / steps
        found.add((-1 if negative else 1) * fraction * 10.0**-zeros)
    return torch.tensor(sorted(found))


@BOOKS
def test_code_book_is_that_of_the_paper(book):
    values = book.values(CPU)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, paper_code_book(book is CodeBook.SIGNED), rtol=1e-6, atol=0)
    assert (values.diff() > 0).all()
    assert values[book.zero] == 0
    assert values[-1] == 1


def test_signed_code_book_has_the_negatives_of_all_values_but_1():
    values = CodeBook.SIGNED.values(CPU)
    assert torch.equal(values[:127], -values[128:255].flip(0))


@BOOKS
def test_every_value_has_its_own_code(book):
    quantized = quantize(book.values(CPU), 256, book)
    assert torch.equal(quantized.codes, torch.arange(256, dtype=torch.uint8))
    assert quantized.scales == 1


@BOOKS
def test_ties_are_rounded_to_the_smaller_magnitude(book):
    middle = book.boundaries(CPU)
    ends = torch.ones(1)
    found = quantize(torch.cat([middle, ends]), 1024, book).codes[:-1]
    assert torch.equal(found, torch.arange(len(middle)).to(torch.uint8) + book.zero)
    above = torch.nextafter(middle, ends)
    found = quantize(torch.cat([above, ends]), 1024, book).codes[:-1]
    assert torch.equal(found, torch.arange(len(middle)).to(torch.uint8) + book.zero + 1)
    if book is CodeBook.SIGNED:
        found = quantize(torch.cat([-middle, ends]), 1024, book).codes[:-1]
        assert torch.equal(found, 127 - torch.arange(len(middle)).to(torch.uint8))


finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)


@BOOKS
@given(values=st.lists(finite, min_size=1, max_size=70), block_size=st.integers(1, 40))
def test_error_is_at_most_half_the_gap_between_codes(book, values, block_size):
    x = torch.tensor(values)
    if book is CodeBook.UNSIGNED:
        x = x.abs()
    quantized = quantize(x, block_size, book)
    assert quantized.scales.shape == (block_count(len(values), block_size),)
    found = dequantize(quantized, block_size, book)
    codes = book.values(CPU).double()
    for start in range(0, len(values), block_size):
        part, got = x[start : start + block_size].double(), found[start : start + block_size]
        scale = part.abs().max().item()
        if scale < TINY:
            assert not got.any()
            continue
        units = part / scale
        nearest = (units[:, None] - codes[None, :]).abs().min(1).values
        error = (got.double() / scale - units).abs()
        assert (error <= nearest + 2e-7).all()
        steps = 64 if book is CodeBook.SIGNED else 128
        assert error.max() <= 0.9 / steps / 2 + 2e-7


@given(exponent=st.integers(-6, 0), fraction=st.floats(0.1, 0.999), sign=st.sampled_from([-1, 1]))
def test_relative_error_grows_with_each_power_of_ten(exponent, fraction, sign):
    x = sign * fraction * 10.0**exponent
    got = roundtrip(torch.tensor([x, 1.0]), 2, CodeBook.SIGNED)[0].item()
    steps = 2 ** (6 + exponent)
    assert abs(got - x) <= 10.0**exponent * 0.9 / steps * (0.5 + 1e-4) + 1e-7


def test_blocks_are_independent():
    x = torch.randn(1000)
    x[256:512] *= 1e6
    together = roundtrip(x, 256, CodeBook.SIGNED)
    x[256:512] = 0
    separate = roundtrip(x, 256, CodeBook.SIGNED)
    assert torch.equal(together[:256], separate[:256])
    assert torch.equal(together[512:], separate[512:])


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan], ids=str)
def test_element_that_is_not_finite_makes_only_its_block_nan(wrong):
    x = torch.ones(96)
    x[40] = wrong
    found = roundtrip(x, 32, CodeBook.SIGNED)
    assert found[32:64].isnan().all()
    assert torch.equal(torch.cat([found[:32], found[64:]]), torch.ones(64))


@BOOKS
def test_zeros_stay_zeros(book):
    quantized = quantize(torch.tensor([0.0, -0.0, 1e-40, 0.0]), 3, book)
    assert (quantized.codes == book.zero).all()
    assert (quantized.scales == 0).all()
    assert not dequantize(quantized, 3, book).any()


def test_empty_tensor_has_no_blocks():
    quantized = quantize(torch.zeros(0), 32, CodeBook.SIGNED)
    assert quantized.codes.shape == quantized.scales.shape == (0,)
    assert (
        dequantize(QuantizedBlocks(quantized.codes, quantized.scales), 32, CodeBook.SIGNED).numel()
        == 0
    )
