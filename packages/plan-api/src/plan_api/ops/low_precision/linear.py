"""A linear layer that quantizes the operands of its products, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from plan_api.ops.low_precision.products import choose_kernels, multiply
from plan_api.ops.low_precision.quantize import Quantized, amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import Recipe, Scaling
from plan_api.ops.low_precision.tokens import QuantizedTokens
from plan_api.ops.low_precision.weights import QuantizedWeight, multiply_by_weight

__all__ = ["FeatureGroups", "LowPrecision", "low_precision_linear"]


@dataclass(frozen=True)
class FeatureGroups:
    """The groups of ranks that shard a weight (N, K).

    Attributes:
        outputs: those that shard its N output features.
        inputs: those that shard its K input features.
    """

    outputs: tuple[dist.ProcessGroup, ...] = ()
    inputs: tuple[dist.ProcessGroup, ...] = ()


@dataclass(frozen=True)
class LowPrecision:
    """A recipe on a device.

    Attributes:
        recipe: of all products.
        kernels: the dtypes of products that kernels compute there.
    """

    recipe: Recipe
    kernels: frozenset[torch.dtype]

    @classmethod
    def on(cls, what: str, recipe: Recipe, device: str) -> LowPrecision:
        """Finds the kernels of a type of devices; see `choose_kernels`."""
        return cls(recipe, choose_kernels(what, recipe, device))

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuses a dtype without kernels under ``products="kernel"``.

        Raises:
            ValueError: names the dtypes that have some.
        """
        if self.recipe.products == "kernel" and dtype not in self.kernels:
            known = ", ".join(sorted(map(str, self.kernels)))
            raise ValueError(
                f"{self.recipe.name} with products='kernel': expected products of {known}, which "
                f"have kernels, got {dtype}; compute in one of these, or use products='auto'"
            )


def low_precision_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: LowPrecision,
    groups: FeatureGroups = FeatureGroups(),
) -> torch.Tensor:
    """Computes ``x @ weight.T + bias`` and its gradients from quantized operands.

    Scales of blocks that no rank shares are local. Where groups shard the rows or columns that
    share a scale, their largest magnitudes are reduced, one all-reduce per group and pass.

    Args:
        x: (..., K), of the dtype of the output; under autocast it is cast to its dtype. Of
            `QuantizedTokens` of the same recipe the operands are taken.
        weight: (N, K); it is cast to the dtype of ``x`` before it is quantized. Its gradient has
            its own dtype. A `QuantizedWeight` is quantized already, with the same recipe.
        bias: (N,) or None; it is added in the dtype of the output.
        precision: the recipe. N and K are multiples of its `Recipe.feature_block`; tokens are
            padded with zeros.
        groups: those that shard the weight; of a sharded K the output is to be summed.

    Returns:
        (..., N), of the dtype of ``x``. It has first derivatives only.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    for dtype in (x.dtype, weight.dtype):
        precision.check_dtype(dtype)
    with torch.autocast(device, enabled=False):
        y: torch.Tensor = _Linear.apply(x, weight, precision, groups)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)


class _Linear(torch.autograd.Function):
    """The three products of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        precision: LowPrecision,
        groups: FeatureGroups,
    ) -> torch.Tensor:
        scalings = precision.recipe.output
        tokens: torch.Tensor | QuantizedTokens
        if isinstance(x, QuantizedTokens) and x.serves(precision.recipe):
            tokens = x
        else:
            tokens = x.reshape(-1, x.shape[-1])
        # It is not saved: FSDP frees and fills the operands of the same object.
        ctx.gathered = gathered = weight if isinstance(weight, QuantizedWeight) else None
        operands: list[_Operand | Quantized] = []
        if isinstance(tokens, QuantizedTokens):
            operands.append(tokens.operands.rows())
        else:
            operands.append(_Operand(tokens, scalings.left, inner=groups.inputs))
        if gathered is None:
            matrix = weight.to(x.dtype)
            operands.append(_Operand(matrix, scalings.right, groups.outputs, groups.inputs))
        left, *others = _quantize_together(*operands)
        if gathered is not None:
            y = multiply_by_weight(left, gathered, x.dtype, precision.kernels, is_gradient=False)
        else:
            y = multiply(left, others[0], x.dtype, precision.kernels)
        ctx.precision, ctx.groups, ctx.shape, ctx.dtype = precision, groups, x.shape, x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.reuses = scalings.left.is_tensorwise
        saved = [] if gathered is not None else [weight]
        ctx.columns = None
        if ctx.reuses:  # one scale for all products: fewer bytes, and no collective in backward
            scales = [one.scales for one in others]
            ctx.save_for_backward(left.data, left.scales, *scales, *saved)
        elif isinstance(tokens, QuantizedTokens):  # backward gathers an operand of its own
            ctx.save_for_backward(tokens.operands.cast, *saved)
            if ctx.needs_input_grad[1]:
                ctx.columns = tokens.operands.columns
                ctx.columns.expect()
        else:
            ctx.save_for_backward(tokens, *saved)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.autocast(grad.device.type, enabled=False):
            return *_gradients(ctx, grad.reshape(-1, grad.shape[-1])), None, None


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of tokens and weight, where they are needed."""
    recipe, kernels, groups = ctx.precision.recipe, ctx.precision.kernels, ctx.groups
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    of_input, of_weight = recipe.grad_input, recipe.grad_weight
    gathered: QuantizedWeight | None = ctx.gathered
    if ctx.reuses:
        data, scales, *saved = ctx.saved_tensors
        (dy_left,) = _quantize_together(_Operand(grad, of_input.left, inner=groups.outputs))
        dx = dw = None
        if needs_input:
            if gathered is not None:
                dx = multiply_by_weight(dy_left, gathered, ctx.dtype, kernels, is_gradient=True)
            else:
                weight_scales, weight = saved
                columns = quantize(weight.to(ctx.dtype).t(), of_input.right, weight_scales)
                dx = multiply(dy_left, columns, ctx.dtype, kernels)
            dx = dx.reshape(ctx.shape)
        if needs_weight:
            x_right = Quantized(data, scales, of_weight.right).transposed()
            dw = multiply(dy_left.transposed(), x_right, ctx.weight_dtype, kernels)
        return dx, dw
    tokens, *saved = ctx.saved_tensors
    operands: list[_Operand | Quantized] = []
    if needs_input:
        operands.append(_Operand(grad, of_input.left, inner=groups.outputs))
        if gathered is None:
            columns = saved[0].to(ctx.dtype).t()
            operands.append(_Operand(columns, of_input.right, groups.inputs, groups.outputs))
    if needs_weight:
        operands.append(_Operand(grad.t(), of_weight.left, groups.outputs))
        if ctx.columns is not None:
            operands.append(ctx.columns.take(tokens))
        else:
            operands.append(_Operand(tokens.t(), of_weight.right, groups.inputs))
    quantized = _quantize_together(*operands)
    dx = dw = None
    if needs_input:
        left = next(quantized)
        if gathered is not None:
            dx = multiply_by_weight(left, gathered, ctx.dtype, kernels, is_gradient=True)
        else:
            dx = multiply(left, next(quantized), ctx.dtype, kernels)
        dx = dx.reshape(ctx.shape)
    if needs_weight:
        dw = multiply(next(quantized), next(quantized), ctx.weight_dtype, kernels)
    return dx, dw


@dataclass(frozen=True)
class _Operand:
    """An operand of a product before it is quantized.

    Attributes:
        matrix: this rank's (outer, inner).
        scaling: how it is quantized.
        outer: the groups of ranks that shard its rows.
        inner: the groups of ranks that shard its columns.
    """

    matrix: torch.Tensor
    scaling: Scaling
    outer: tuple[dist.ProcessGroup, ...] = ()
    inner: tuple[dist.ProcessGroup, ...] = ()

    @property
    def sharing(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks that share a scale."""
        outer = self.outer if self.scaling.outer is None else ()
        return (*outer, *(self.inner if self.scaling.inner is None else ()))


def _quantize_together(*operands: _Operand | Quantized) -> Iterator[Quantized]:
    """Quantizes operands, with one all-reduce per group of ranks that share scales."""
    plain = [one for one in operands if isinstance(one, _Operand)]
    amaxes = [amax_of(one.matrix, one.scaling) for one in plain]
    for group in dict.fromkeys(group for one in plain for group in one.sharing):
        shared = [at for at, one in enumerate(plain) if group in one.sharing]
        together = torch.cat([amaxes[at].flatten() for at in shared])
        dist.all_reduce(together, dist.ReduceOp.MAX, group)
        parts = together.split([amaxes[at].numel() for at in shared])
        for at, part in zip(shared, parts, strict=True):
            amaxes[at] = part.view(amaxes[at].shape)
    remaining = iter(amaxes)
    for one in operands:
        if isinstance(one, Quantized):
            yield one
        else:
            yield quantize(one.matrix, one.scaling, scales_of(next(remaining), one.scaling))
