"""A linear layer's three products are those of operands that the recipe quantizes."""

import pytest
import torch
from torch import nn

import plan_api
from plan_api import MXFP8, Float8Block, Float8Rowwise, Float8Tensorwise, use_low_precision
from plan_api.ops.low_precision.linear import LowPrecision, low_precision_linear

REFERENCE = [
    Float8Tensorwise("reference"),
    Float8Rowwise("reference"),
    Float8Block("reference", 16),
    MXFP8("reference"),
]
RECIPES = [*REFERENCE, Float8Tensorwise(), Float8Rowwise()]
of_all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def rounded(matrix, scaling):
    """A matrix after quantization, block by block, in float64."""
    found = torch.empty(matrix.shape, dtype=torch.float64)
    rows, columns = scaling.outer or matrix.shape[0], scaling.inner or matrix.shape[1]
    largest = torch.finfo(scaling.dtype).max
    for i in range(0, matrix.shape[0], rows):
        for j in range(0, matrix.shape[1], columns):
            at = slice(i, i + rows), slice(j, j + columns)
            amax = matrix[at].abs().max()
            scale = amax / largest
            if scaling.scales == "power-of-2":
                scale = 2.0 ** scale.log2().ceil()
            elif scaling.scales == "e8m0":
                scale = 2.0 ** (amax.log2().floor() - 8)
            elements = (matrix[at] / scale).clamp(-largest, largest).to(scaling.dtype)
            found[at] = elements.double() * scale.double()
    return found


def layer(recipe, tokens=(2, 20), dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(*tokens, 64, dtype=dtype, requires_grad=True)
    linear = nn.Linear(64, 32)
    return x, linear, LowPrecision.on("", recipe, "cpu")


@of_all_recipes
def test_output_and_gradients_are_products_of_rounded_operands(recipe):
    x, linear, precision = layer(recipe)
    weight = linear.weight
    y = low_precision_linear(x, weight, None, precision)
    grad = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, weight), grad)
    tokens, grads = x.detach().flatten(0, 1), grad.flatten(0, 1)
    w = weight.detach()
    expected = [
        rounded(left, operands.left) @ rounded(right, operands.right).t()
        for operands, left, right in (
            (recipe.output, tokens, w),
            (recipe.grad_input, grads, w.t()),
            (recipe.grad_weight, grads.t(), tokens.t()),
        )
    ]
    found = y.detach().flatten(0, 1), dx.flatten(0, 1), dw
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


@of_all_recipes
def test_the_bias_is_added_in_full_precision(recipe):
    x, linear, precision = layer(recipe)
    without = low_precision_linear(x, linear.weight, None, precision)
    y = low_precision_linear(x, linear.weight, linear.bias, precision)
    assert torch.equal(y, without + linear.bias)
    (grad,) = torch.autograd.grad(y.sum(), linear.bias)
    assert torch.equal(grad, torch.full((32,), 40.0))


@of_all_recipes
def test_autocast_has_the_bits_of_tokens_and_a_weight_in_bfloat16(recipe):
    x, linear, precision = layer(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        y = low_precision_linear(x, linear.weight, linear.bias, precision)
    grad = torch.randn_like(y)
    under_autocast = torch.autograd.grad(y, (x, linear.weight), grad)
    low, w = x.detach().bfloat16().requires_grad_(), linear.weight.detach().bfloat16()
    w.requires_grad_()
    expected = low_precision_linear(low, w, linear.bias.bfloat16(), precision)
    gradients = torch.autograd.grad(expected, (low, w), grad)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert [one.dtype for one in under_autocast] == [torch.float32] * 2
    assert torch.equal(under_autocast[0], gradients[0].float())
    assert torch.equal(under_autocast[1].bfloat16(), gradients[1])  # itself not rounded


@of_all_recipes
def test_a_gradient_that_nobody_needs_is_not_computed(recipe):
    x, linear, precision = layer(recipe)
    both = torch.autograd.grad(
        low_precision_linear(x, linear.weight, None, precision).square().sum(), (x, linear.weight)
    )
    y = low_precision_linear(x.detach(), linear.weight, None, precision)
    assert torch.equal(torch.autograd.grad(y.square().sum(), linear.weight)[0], both[1])
    y = low_precision_linear(x, linear.weight.detach(), None, precision)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], both[0])


@of_all_recipes
def test_no_tokens_have_a_gradient_of_zeros(recipe):
    x, linear, precision = layer(recipe, tokens=(0,))
    y = low_precision_linear(x, linear.weight, None, precision)
    dx, dw = torch.autograd.grad(y.sum(), (x, linear.weight))
    assert y.shape == (0, 32)
    assert dx.shape == (0, 64)
    assert torch.equal(dw, torch.zeros(32, 64))


def test_a_dtype_without_kernels_is_refused_where_they_are_required():
    x, linear, _ = layer(RECIPES[0])
    precision = LowPrecision(Float8Rowwise("kernel"), frozenset({torch.bfloat16}))
    with pytest.raises(ValueError, match=r"expected products of torch.bfloat16.*got torch.float32"):
        low_precision_linear(x, linear.weight, None, precision)


@of_all_recipes
def test_a_model_without_a_plan_uses_it_until_it_is_removed(recipe):
    x, linear, precision = layer(recipe)
    model = nn.Sequential(linear, nn.ReLU(), nn.Linear(32, 32))
    before = model(x)
    handles = use_low_precision(model, "0", recipe)
    assert torch.equal(model[0](x), low_precision_linear(x, linear.weight, linear.bias, precision))
    assert model[2].forward.__func__ is nn.Linear.forward
    for handle in handles:
        handle.remove()
    assert torch.equal(model(x), before)


def test_a_model_without_a_plan_is_refused_with_the_nearest_sizes():
    model = nn.Sequential(nn.Linear(160, 64))
    with pytest.raises(ValueError, match=r"\(64, 160\); the nearest that fits is out_features=128"):
        use_low_precision(model, "0", Float8Block("reference"))
    with pytest.raises(ValueError, match="in_features=128 or 256"):
        use_low_precision(nn.Sequential(nn.Linear(160, 128)), "0", Float8Block("reference"))
    with pytest.raises(ValueError, match="no module has this name"):
        use_low_precision(model, "1", MXFP8("reference"))
    with pytest.raises(ValueError, match="expected one of Float8Tensorwise"):
        use_low_precision(model, "0", "mxfp8")
    assert "forward" not in vars(model[0])


def test_recipes_are_public():
    assert {Float8Tensorwise, Float8Rowwise, Float8Block, MXFP8} <= {
        getattr(plan_api, name)
        for name in plan_api.__all__
        if isinstance(getattr(plan_api, name), type)
    }
