"""Weights that ranks of FSDP quantize before they gather them, as operands of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from plan_api.ops.low_precision.operand_tensor import OperandTensor
from plan_api.ops.low_precision.quantize import Quantized, amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import Recipe, Scaling, check_recipe

__all__ = ["GatheredOperand", "QuantizedWeight"]

_Direction: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True)
class _Operands:
    """The operands of one weight, which its aliases share.

    Attributes:
        differ_in_backward: whether products of backward take other bytes than those of forward.
        gather: gathers what is not found; see `fsdp.quantized.OperandFormat.unsharded`.
        found: the quantized weight, and its quantized transpose if that has other bytes.
    """

    differ_in_backward: bool
    gather: Callable[[_Direction], None]
    found: dict[_Direction, Quantized] = field(default_factory=dict)

    def of(self, direction: _Direction) -> Quantized:
        """Returns the operand of a direction."""
        if direction not in self.found:
            self.gather(direction)
        return self.found[direction]


class QuantizedWeight(OperandTensor):
    """A weight (N, K) of which there are only operands of products, and no dequantized copy.

    An operator that takes no operands dequantizes, in a temporary tensor.

    Attributes:
        operands: those that are gathered at present.
    """

    operands: _Operands

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Returns its shape, dtype and the operands that it has."""
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, {sorted(self.operands.found)})"

    def of_output(self) -> Quantized:
        """Returns the right operand of the output's product: (N, K)."""
        return self.operands.of("forward")

    def of_grad_input(self) -> Quantized:
        """Returns the right operand of the product of the input's gradient: (K, N)."""
        if self.operands.differ_in_backward:
            return self.operands.of("backward")
        return self.of_output().transposed()

    def plain(self) -> torch.Tensor:
        """Implements `OperandTensor`: dequantizes."""
        return self.of_output().dequantized().to(self.dtype)


@dataclass(frozen=True)
class _Form:
    """The operand of one direction.

    Attributes:
        scaling: of the operand.
        is_transposed: whether the operand is the weight's transpose.
    """

    scaling: Scaling
    is_transposed: bool

    @property
    def rows(self) -> int | None:
        """The number of the weight's rows that share a scale; None: all, and so all ranks."""
        return self.scaling.inner if self.is_transposed else self.scaling.outer

    @property
    def columns(self) -> int | None:
        """The number of the weight's columns that share a scale; None: all."""
        return self.scaling.outer if self.is_transposed else self.scaling.inner

    @property
    def scales_dtype(self) -> torch.dtype:
        """In which scales are sent; powers of two need no more than a byte."""
        return torch.float32 if self.scaling.scales == "float32" else torch.float8_e8m0fnu

    def operand_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns rows of a weight, or scales of its blocks, as the operand has them, or back."""
        return weight.t().contiguous() if self.is_transposed else weight


@dataclass(frozen=True)
class GatheredOperand:
    """The form in which FSDP gathers the weight of a linear layer in low precision.

    A ``quantize_fn`` of ``fsdp.fully_shard`` returns it for weights of linear layers that
    `use_low_precision` or `Plan.precision` quantize with the same recipe. Each rank quantizes its
    rows, and float8 elements and scales are gathered; the products have the bits of quantizing the
    gathered weight. Where the recipe gives backward other scales than forward (`Float8Rowwise`,
    `MXFP8`), each of them gathers its own bytes.

    Attributes:
        recipe: of the layer.
    """

    recipe: Recipe
    _forms: dict[_Direction, _Form] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the recipe."""
        check_recipe("GatheredOperand", self.recipe)
        forward, backward = self.recipe.output.right, self.recipe.grad_input.right
        forms: dict[_Direction, _Form] = {"forward": _Form(forward, is_transposed=False)}
        if forward != backward or not forward.is_square:
            forms["backward"] = _Form(backward, is_transposed=True)
        object.__setattr__(self, "_forms", forms)

    def __str__(self) -> str:
        return f"operands of {self.recipe}"

    # As fsdp.quantized.OperandFormat says.

    @property
    def differs_in_backward(self) -> bool:
        """Whether products of backward take other bytes than those of forward."""
        return "backward" in self._forms

    @property
    def has_local_scales(self) -> bool:
        """Whether no scale is one of a whole row, column or matrix, in either direction.

        Then ranks that shard a weight along either dim, in whole blocks, share no scale.
        """
        return all(one.rows is not None and one.columns is not None for one in self._forms.values())

    def block(self, shape: Sequence[int]) -> int:
        """Returns the elements of the rows that share scales in one direction or the other."""
        rows = max(form.rows or 1 for form in self._forms.values())
        return max(1, min(rows, shape[0]) * shape[1])

    def tensors(self, shape: Sequence[int], direction: _Direction) -> tuple[torch.Tensor, ...]:
        """Returns meta tensors like the elements and, if they are not shared, the scales."""
        form = self._forms[direction]
        elements = torch.empty(tuple(shape), dtype=form.scaling.dtype, device="meta")
        if form.rows is None:
            return (elements,)
        blocks = shape[0] // form.rows, 1 if form.columns is None else shape[1] // form.columns
        return elements, torch.empty(blocks, dtype=form.scales_dtype, device="meta")

    def maxima(self, rows: torch.Tensor, direction: _Direction) -> torch.Tensor | None:
        """Returns the largest magnitudes of blocks that have all rows; None: there are none."""
        form = self._forms[direction]
        if form.rows is not None:
            return None
        return amax_of(form.operand_of(rows), form.scaling).flatten()

    def quantize(
        self, rows: torch.Tensor, maxima: torch.Tensor | None, direction: _Direction
    ) -> tuple[torch.Tensor, ...]:
        """Returns elements and, if they are not shared, scales."""
        form = self._forms[direction]
        matrix = form.operand_of(rows)
        amax = amax_of(matrix, form.scaling) if maxima is None else _as_scales(maxima, form)
        found = quantize(matrix, form.scaling, scales_of(amax, form.scaling))
        elements = form.operand_of(found.data)
        if form.rows is None:
            return (elements,)
        return elements, form.operand_of(found.scales).to(form.scales_dtype)

    def unsharded(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        gather: Callable[[_Direction], None],
    ) -> QuantizedWeight:
        """Returns a weight without operands."""
        return QuantizedWeight(shape, dtype, device, _Operands(self.differs_in_backward, gather))

    def fill(
        self,
        weight: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        maxima: torch.Tensor | None,
        direction: _Direction,
    ) -> None:
        """Gives a weight the operand of a direction."""
        assert isinstance(weight, QuantizedWeight)
        form = self._forms[direction]
        if maxima is None:
            scales = form.operand_of(gathered[1]).float()
        else:
            scales = scales_of(_as_scales(maxima, form), form.scaling)
        weight.operands.found[direction] = Quantized(
            form.operand_of(gathered[0]), scales, form.scaling
        )

    def clear(self, weight: torch.Tensor) -> None:
        """Drops the operands of a weight."""
        assert isinstance(weight, QuantizedWeight)
        weight.operands.found.clear()


def _as_scales(maxima: torch.Tensor, form: _Form) -> torch.Tensor:
    """Returns maxima in the shape of the operand's scales, of one block of the weight's rows."""
    return maxima.view(-1, 1) if form.is_transposed else maxima.view(1, -1)
