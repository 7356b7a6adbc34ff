"""Multiplies quantized matrices, by a kernel of torch or a reference with the same rounding."""

from __future__ import annotations

import functools
import warnings

import torch

from plan_api.ops.low_precision.quantize import Quantized, amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import Operands, Recipe

__all__ = ["choose_kernels", "multiply", "multiply_by_kernel", "multiply_by_reference"]

_OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def multiply(
    left: Quantized, right: Quantized, dtype: torch.dtype, kernels: frozenset[torch.dtype]
) -> torch.Tensor:
    """Returns the product (M, N) of (M, K) and (N, K), summed in float32.

    Args:
        left: the first operand.
        right: the second operand.
        dtype: of the product.
        kernels: the dtypes of products that a kernel computes; see `choose_kernels`.
    """
    if not left.data.numel() or not right.data.numel():
        return left.scales.new_zeros(len(left.data), len(right.data), dtype=dtype)
    if dtype in kernels and _has_sizes_of_kernels(left, right):
        return multiply_by_kernel(left, right, dtype)
    return multiply_by_reference(left, right, dtype)


def multiply_by_kernel(left: Quantized, right: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Returns the product in ``torch._scaled_mm``; operands have one scale, or one per row."""
    is_tensorwise = left.scaling.is_tensorwise
    product: torch.Tensor = torch._scaled_mm(
        left.data,
        right.data.t(),
        left.scales.reshape(()) if is_tensorwise else left.scales,
        right.scales.reshape(()) if is_tensorwise else right.scales.t(),
        out_dtype=dtype,
    )
    return product


def multiply_by_reference(left: Quantized, right: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Returns the product in plain torch, as kernels compute it.

    The elements of a block are multiplied in float32, the sum is scaled, and added to that of the
    blocks before. With power-of-two scales elements are scaled first, which rounds nothing.
    """
    if left.scaling.scales == "e8m0":
        return (left.dequantized() @ right.dequantized().t()).to(dtype)
    total: torch.Tensor | None = None
    size = left.scaling.inner or left.data.shape[1]
    columns = zip(left.data.split(size, 1), right.data.split(size, 1), strict=True)
    for number, (a, b) in enumerate(columns):
        product = a.float() @ b.float().t()
        product = product * _of_rows(left, number)[:, None] * _of_rows(right, number)[None, :]
        total = product if total is None else total + product
    assert total is not None  # there is one block at least
    return total.to(dtype)


def _of_rows(matrix: Quantized, number: int) -> torch.Tensor:
    """Returns the scale of each row in one of its blocks; of one scale that one."""
    scales = matrix.scales[:, number]
    rows = matrix.scaling.outer
    return scales if rows in (None, 1) else scales.repeat_interleave(rows)


def choose_kernels(what: str, recipe: Recipe, device: str) -> frozenset[torch.dtype]:
    """Returns the dtypes of products that kernels of a device compute for a recipe.

    Args:
        what: begins messages.
        recipe: any; without kernels ``products="auto"`` warns, once.
        device: the type of the device.

    Raises:
        ValueError: the recipe has ``products="kernel"``, and the device has none.
    """
    if recipe.products == "reference":
        return frozenset()
    operands = (recipe.output, recipe.grad_input, recipe.grad_weight)
    found = frozenset(
        dtype
        for dtype in _OUTPUT_DTYPES
        if all(_runs(one, device, dtype) for one in dict.fromkeys(operands))
    )
    if found:
        return found
    if recipe.products == "kernel":
        raise ValueError(
            f"{what}: expected a device with kernels of torch for {recipe.name}, got {device}; use "
            f"products='reference', which computes the same slowly"
        )
    _warn_once(recipe.name, device)
    return found


@functools.lru_cache
def _warn_once(recipe: str, device: str) -> None:
    warnings.warn(
        f"torch has no kernel for {recipe} on {device}: matrix products run in plain torch, slower "
        f"than without; products='reference' in the recipe says so, products='kernel' refuses it",
        stacklevel=2,
    )


@functools.lru_cache
def _runs(operands: Operands, device: str, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies two small matrices there."""
    if not all(one.inner is None for one in (operands.left, operands.right)):
        return False  # torch._scaled_mm takes scales of blocks on few GPUs, in layouts of its own
    if device == "meta":
        return False
    matrix = torch.ones(16, 16, device=device)
    left, right = (
        quantize(matrix, one, scales_of(amax_of(matrix, one), one))
        for one in (operands.left, operands.right)
    )
    # Only a try tells: devices and releases of torch refuse with either of these.
    try:
        multiply_by_kernel(left, right, dtype)
    except (RuntimeError, ValueError):
        return False
    return True


def _has_sizes_of_kernels(left: Quantized, right: Quantized) -> bool:
    """Whether sizes are multiples of 16, as kernels of GPUs need them."""
    return left.data.device.type == "cpu" or not (left.data.shape[1] % 16 or len(right.data) % 16)
