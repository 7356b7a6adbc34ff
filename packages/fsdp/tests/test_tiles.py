"""Tiles: codes and scales, the error bound, edges, and the layout of the bytes sent."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.quantized import Quantized, Tiles, dequantize, quantize
from fsdp.quantized.byte_layout import ParamFormat, byte_layout_of
from fsdp.quantized.tiles import TINY
from ragged_shard.planner import TensorSpec, plan_layout, verify

DTYPES = (torch.int8, torch.float8_e4m3fn)
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["int8", "e4m3"])
LARGEST = dict(zip(DTYPES, (127, 448), strict=True))


def roundtrip(weight, tiles):
    return dequantize(quantize(weight, tiles), tiles)


def corners(tiles, rows, cols):
    """Returns the tiles of a matrix, as slices."""
    for top in range(0, rows, tiles.rows):
        for left in range(0, cols, tiles.cols):
            yield slice(top, top + tiles.rows), slice(left, left + tiles.cols)


finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)


@st.composite
def matrices(draw):
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    values = draw(st.lists(finite, min_size=rows * cols, max_size=rows * cols))
    sizes = st.integers(1, 5)
    return torch.tensor(values).view(rows, cols), draw(sizes), draw(sizes)


@BOTH
@given(drawn=matrices())
def test_quantization_error_is_at_most_half_a_step(dtype, drawn):
    weight, rows, cols = drawn
    tiles = Tiles(dtype, rows, cols)
    quantized = quantize(weight, tiles)
    found = dequantize(quantized, tiles)
    assert quantized.codes.dtype is dtype
    assert quantized.scales.shape == (-(-weight.shape[0] // rows), -(-weight.shape[1] // cols))
    scales = iter(quantized.scales.flatten().double())
    for place in corners(tiles, *weight.shape):
        part, got, scale = weight[place].double(), found[place].double(), next(scales).item()
        largest = part.abs().max().item()
        if largest / LARGEST[dtype] < TINY * (1 - 1e-6):
            assert scale == 0
        if scale == 0:
            assert largest <= LARGEST[dtype] * TINY * (1 + 1e-6)
            assert not got.any()
            continue
        assert scale == pytest.approx(largest / LARGEST[dtype], rel=1e-6)
        error = (got - part).abs()
        if dtype is torch.int8:
            assert (error <= scale / 2 * (1 + 1e-4)).all()
        else:
            assert (error <= torch.clamp(part.abs() / 16, min=scale / 1024) * (1 + 1e-4)).all()


@BOTH
def test_every_code_survives_a_round_trip(dtype):
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite() & (codes.float().abs() <= LARGEST[dtype])]
    weight = codes.float()[None] * 0.25
    quantized = quantize(weight, Tiles(dtype, 1, 256))
    assert len(codes) == (255 if dtype is torch.int8 else 254)
    assert quantized.scales == 0.25
    assert torch.equal(quantized.codes[0].float(), codes.float())
    assert torch.equal(dequantize(quantized, Tiles(dtype, 1, 256)), weight)


def test_ties_round_to_the_even_code():
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 127]])
    for scale in (1, 15, 61, 117):  # whose reciprocals are not exact
        assert quantize(scale * weight, Tiles()).codes.tolist() == [[0, 2, 2, 0, -2, 127]]


@BOTH
@pytest.mark.parametrize("rows", [128, 192, 7], ids=lambda rows: f"{rows} rows")
def test_stack_is_quantized_as_its_matrices(dtype, rows):
    """A tile never spans two experts, whether or not they are whole strips."""
    stack, tiles = torch.randn(3, rows, 130), Tiles(dtype)
    quantized = quantize(stack, tiles)
    for number, matrix in enumerate(stack):
        alone = quantize(matrix, tiles)
        assert torch.equal(quantized.codes[number].float(), alone.codes.float())
        assert torch.equal(quantized.scales[number], alone.scales)


@BOTH
def test_part_of_whole_tiles_is_quantized_as_in_the_tensor(dtype):
    tiles = Tiles(dtype, 4, 3)
    for shape in [(10, 7), (2, 8, 7), (3, 6, 7), (2, 3, 2, 3), (3, 1)]:
        weight, block = torch.randn(shape), tiles.block(shape)
        wanted = roundtrip(weight, tiles).flatten()
        assert block % shape[-1] == 0
        for begin in range(0, weight.numel(), block):
            for end in range(begin + block, weight.numel() + block, block):
                part = weight.flatten()[begin:end]
                part = part.view(tiles.matrices(part.numel(), shape))
                assert torch.equal(roundtrip(part, tiles).flatten(), wanted[begin:end])


def test_blocks_are_the_smallest_that_split_no_tile():
    tiles = Tiles()
    assert tiles.block((512, 300)) == tiles.block((200, 300)) == 128 * 300
    assert tiles.block((4, 256, 300)) == 128 * 300  # whole strips, over all experts
    assert tiles.block((4, 192, 300)) == 192 * 300  # a whole expert
    assert tiles.block((100, 300)) == 100 * 300
    assert tiles.block((0, 300)) == 1


@BOTH
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan], ids=str)
def test_only_tiles_with_non_finite_elements_are_nan(dtype, wrong):
    weight = torch.ones(6, 6)
    weight[3, 3] = wrong
    tiles = Tiles(dtype, 2, 2)
    found = roundtrip(weight, tiles)
    assert found[2:4, 2:4].isnan().all()
    found[2:4, 2:4] = 1
    assert torch.equal(found, torch.ones(6, 6))
    assert quantize(weight, tiles).scales.isnan().sum() == 1


@BOTH
def test_zeros_are_dequantized_to_zeros(dtype):
    weight = torch.ones(4, 4)
    weight[:2, :2] = torch.tensor([[0.0, -0.0], [1e-40, -1e-38]])
    quantized = quantize(weight, Tiles(dtype, 2, 2))
    assert quantized.scales[0, 0] == 0
    assert not quantized.codes[:2, :2].float().any()
    assert not roundtrip(weight, Tiles(dtype, 2, 2))[:2, :2].any()


@BOTH
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dequantized_product_is_rounded_once(dtype, compute):
    weight, tiles = torch.randn(5, 9), Tiles(dtype, 2, 4)
    quantized = quantize(weight, tiles)
    wanted = dequantize(quantized, tiles).to(compute)
    found = dequantize(quantized, tiles, compute)
    assert found.dtype is compute
    if compute is torch.float64:  # not even once
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)
    else:
        assert torch.equal(found, wanted)


def test_bfloat16_weights_have_the_codes_of_fp32():
    weight = torch.randn(5, 9, dtype=torch.bfloat16)
    for dtype in DTYPES:
        tiles = Tiles(dtype, 2, 4)
        assert torch.equal(roundtrip(weight, tiles), roundtrip(weight.float(), tiles))


def test_empty_tensors_have_no_codes():
    for shape in [(0, 5), (5, 0), (0, 3, 4)]:
        tiles = Tiles(rows=2, cols=2)
        quantized = quantize(torch.zeros(shape), tiles)
        assert quantized.codes.shape == shape
        assert quantized.scales.shape == tiles.grid(shape)
        assert dequantize(Quantized(quantized.codes, quantized.scales), tiles).shape == shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.uint8}, r"one of \[torch.int8, torch.float8.*got torch.uint8"),
        ({"rows": 0}, "rows: expected an integer of at least 1, got 0"),
        ({"cols": 2.0}, "cols: expected .* got 2.0"),
    ],
    ids=["dtype", "rows", "cols"],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Tiles(**options)


# The layout of bytes.


def layouts(world, *params):
    """Returns the layout, byte layout and formats of parameters, each a shape and its tiles."""
    forms = [ParamFormat(torch.bfloat16, shape, tiles) for shape, tiles in params]
    specs = [
        TensorSpec(
            f"p{number}", math.prod(form.shape), form.tiles.block(form.shape) if form.tiles else 1,
            form.shape,
        )
        for number, form in enumerate(forms)
    ]  # fmt: skip
    layout = plan_layout(specs, world, alignment=8, order="best")
    return layout, byte_layout_of(layout, forms), forms


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_byte_layout_has_every_element_once_without_overlap(world):
    small = Tiles(rows=4, cols=3)
    _, found, forms = layouts(
        world, ((10, 7), small), ((5,), None), ((3, 6, 7), small), ((0, 4), small), ((), None)
    )
    verify(found.layout)
    intervals = {}
    for part in found.parts:
        intervals.setdefault(part.param, []).append((part.begin, part.begin + part.numel))
        form, numbers = forms[part.param], [one.number for one in part.tensors]
        sizes = [found.layout.specs[number].numel for number in numbers]
        assert {found.layout.owners(number) for number in numbers} == {
            range(part.rank, part.rank + 1)
        }
        if form.tiles is None:
            assert sizes == [2 * part.numel]
            continue
        shape = form.tiles.matrices(part.numel, form.shape)
        assert sizes == [part.numel, 4 * math.prod(form.tiles.grid(shape))]
    for param, form in enumerate(forms):
        ends = [0]
        for begin, end in sorted(intervals.get(param, [])):
            assert begin == ends[-1]
            ends.append(end)
        assert ends[-1] == math.prod(form.shape)
    starts = [start % 16 for start in found.layout.starts]
    assert not any(starts)


def test_byte_layout_of_fp32_weights_is_a_quarter_of_their_bytes():
    layout, found, _ = layouts(2, ((4096, 1024), Tiles()), ((1024,), None), ((1024,), None))
    assert found.layout.buffer_size <= 0.251 * 4 * layout.total


def test_sizes_accept_numpy_integers_and_become_ints():
    tiles = Tiles(rows=np.int64(32), cols=np.int32(16))
    assert tiles == Tiles(rows=32, cols=16)
    assert {type(tiles.rows), type(tiles.cols)} == {int}
