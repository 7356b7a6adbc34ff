"""Products by gathered weights in graphs of torch.compile.

The operands are no inputs of a graph: those of backward do not exist while forward runs, and a
compiler may compute in forward whatever depends on inputs alone. A graph has a key instead, a
tensor with a number, and its operators find the operands by it when they run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from plan_api.ops.low_precision.products import multiply
from plan_api.ops.low_precision.quantize import Quantized
from plan_api.ops.low_precision.recipes import Recipe

__all__ = [
    "GraphWeight",
    "dequantized_in_graph",
    "is_product_in_graph",
    "key_of",
    "multiply_in_graph",
]


class GraphWeight(Protocol):
    """The operands of a weight of one matrix or several."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of products."""
        ...

    def of(self, number: int, *, is_transposed: bool) -> Quantized:
        """Returns the operand of a matrix, or of its transpose."""
        ...

    def plain(self, number: int | None, *, is_transposed: bool) -> torch.Tensor:
        """Returns a matrix in float32, or all of them, or their transposes."""
        ...


_numbers = itertools.count()
_by_number: WeakValueDictionary[int, GraphWeight] = WeakValueDictionary()


def key_of(weight: GraphWeight) -> torch.Tensor:
    """Returns a new key of a weight: int64 (), on the CPU."""
    _operators()
    number = next(_numbers)
    _by_number[number] = weight
    return torch.tensor(number)


def multiply_in_graph(
    left: Quantized,
    weight: torch.Tensor,
    dtype: torch.dtype,
    kernels: frozenset[torch.dtype],
    *,
    is_gradient: bool,
) -> torch.Tensor:
    """Returns the product (M, N) of (M, K) and a weight (N, K), or of the gradient's.

    Args:
        left: the first operand.
        weight: (N, K), or (K, N) with ``is_gradient``; its class gives its key to the operator.
        dtype: as of `multiply`.
        kernels: as of `multiply`.
        is_gradient: whether the product is the gradient of the input.
    """
    product: torch.Tensor = torch.ops.plan_api.multiply_by_weight(
        left.data, left.scales, weight, weight.shape[1 if is_gradient else 0], dtype,
        is_gradient, dtype in kernels,
    )  # fmt: skip
    return product


def is_product_in_graph(operator: Any) -> bool:
    """Whether an operator is that of `multiply_in_graph`."""
    return operator is torch.ops.plan_api.multiply_by_weight.default


def dequantized_in_graph(
    key: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    number: int | None,
    *,
    is_transposed: bool,
) -> torch.Tensor:
    """Returns a weight as `GraphWeight.plain`, of a dtype."""
    weight: torch.Tensor = torch.ops.plan_api.dequantized_weight(
        key, shape, dtype, device, number, is_transposed
    )
    return weight


@functools.cache
def _operators() -> torch.library.Library:
    """Registers the operators, which exist as long as the process."""
    library = torch.library.Library("plan_api", "FRAGMENT")
    library.define(
        "multiply_by_weight(Tensor data, Tensor scales, Tensor key, int features, ScalarType dtype,"
        " bool is_gradient, bool has_kernel, int? number=None, bool is_transposed=False) -> Tensor"
    )
    library.define(
        "dequantized_weight(Tensor key, int[] shape, ScalarType dtype, Device device, "
        "int? number, bool is_transposed) -> Tensor"
    )
    for name, run, shape in (
        ("multiply_by_weight", _multiply_by_weight, _shape_of_product),
        ("dequantized_weight", _dequantized_weight, _shape_of_weight),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"plan_api::{name}", shape, lib=library)
    return library


def _multiply_by_weight(
    data: torch.Tensor,
    scales: torch.Tensor,
    key: torch.Tensor,
    features: int,
    dtype: torch.dtype,
    is_gradient: bool,
    has_kernel: bool,
    number: int | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    found = _by_number[int(key)]
    operands = found.recipe.grad_input if is_gradient else found.recipe.output
    right = found.of(number or 0, is_transposed=is_transposed != is_gradient)
    kernels = frozenset({dtype}) if has_kernel else frozenset()
    return multiply(Quantized(data, scales, operands.left), right, dtype, kernels)


def _shape_of_product(data: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    _, _, features, dtype, *_ = others
    return data.new_empty(data.shape[0], features, dtype=dtype)


def _dequantized_weight(
    key: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
    number: int | None,
    is_transposed: bool,
) -> torch.Tensor:
    found = _by_number[int(key)].plain(number, is_transposed=is_transposed)
    return found.to(dtype).contiguous()


def _shape_of_weight(
    key: torch.Tensor, shape: list[int], dtype: torch.dtype, device: torch.device, *_: Any
) -> torch.Tensor:
    return key.new_empty(shape, dtype=dtype, device=device)
