"""Kernels and the reference multiply quantized matrices alike."""

import warnings

import pytest
import torch

from plan_api.ops.low_precision import products
from plan_api.ops.low_precision.products import (
    choose_kernels,
    multiply,
    multiply_by_kernel,
    multiply_by_reference,
)
from plan_api.ops.low_precision.quantize import amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
)

RECIPES = [Float8Tensorwise(), Float8Rowwise(), Float8Block(block=16), MXFP8()]
of_all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
DTYPES = [torch.float32, torch.bfloat16]
ALL = {torch.float32, torch.bfloat16, torch.float16}


def operands(recipe, product="output", m=24, k=96, n=32):
    torch.manual_seed(0)
    matrices = torch.randn(m, k), torch.randn(n, k) * torch.logspace(-1, 1, k)
    scalings = getattr(recipe, product)
    return [
        quantize(matrix, one, scales_of(amax_of(matrix, one), one))
        for matrix, one in zip(matrices, (scalings.left, scalings.right), strict=True)
    ]


@pytest.mark.parametrize("product", ["output", "grad_input"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_and_reference_have_the_same_bits_with_powers_of_two(product, dtype):
    left, right = operands(Float8Rowwise(), product)
    by_kernel = multiply_by_kernel(left, right, dtype)
    assert by_kernel.dtype == dtype
    assert torch.equal(by_kernel, multiply_by_reference(left, right, dtype))


@pytest.mark.parametrize("product", ["output", "grad_input"])
def test_kernel_and_reference_differ_by_the_rounding_of_float32_scales(product):
    left, right = operands(Float8Tensorwise(), product)
    by_kernel = multiply_by_kernel(left, right, torch.float32)
    by_reference = multiply_by_reference(left, right, torch.float32)
    of_summands = left.dequantized().abs() @ right.dequantized().abs().t()
    assert ((by_kernel - by_reference).abs() <= 2**-22 * of_summands).all()


@of_all_recipes
def test_the_reference_is_the_product_of_dequantized_matrices(recipe):
    left, right = operands(recipe)
    exact = left.dequantized().double() @ right.dequantized().double().t()
    found = multiply_by_reference(left, right, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: recipe.name)
def test_the_cpu_has_kernels_of_tensors_and_rows(recipe):
    assert choose_kernels("", recipe, "cpu") == ALL


def test_a_device_without_kernels_warns_once():
    products._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="torch has no kernel for mxfp8 on cpu"):
        assert choose_kernels("", MXFP8(), "cpu") == frozenset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_kernels("", MXFP8(), "cpu")
        choose_kernels("", MXFP8("reference"), "cpu")


def test_a_device_without_kernels_is_refused_where_they_are_required():
    with pytest.raises(
        ValueError, match=r"here: expected a device with kernels.*float8-block.*cpu"
    ):
        choose_kernels("here", Float8Block("kernel"), "cpu")


@of_all_recipes
def test_no_rows_have_no_products(recipe):
    left, right = operands(recipe)
    empty = type(left)(left.data[:0], left.scales[: (left.scaling.outer is None)], left.scaling)
    assert multiply(empty, right, torch.float32, frozenset(ALL)).shape == (0, 32)
