"""Weights that ranks of FSDP quantize before they gather them, as operands of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch

from plan_api.ops.low_precision.graph_products import (
    dequantized_in_graph,
    is_product_in_graph,
    key_of,
    multiply_in_graph,
)
from plan_api.ops.low_precision.operand_tensor import OperandTensor
from plan_api.ops.low_precision.products import multiply
from plan_api.ops.low_precision.quantize import Quantized, amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import Recipe, Scaling, check_recipe

__all__ = ["GatheredOperand", "QuantizedWeight", "multiply_by_weight"]

_aten = torch.ops.aten
_Direction: TypeAlias = Literal["forward", "backward"]
_Context: TypeAlias = tuple[torch.dtype, torch.device, int | None, bool]


@dataclass(frozen=True, eq=False)
class _Gathered:
    """The operands of one weight.

    Attributes:
        recipe: of products.
        directions: in which the operands of its matrices (False) and of their transposes (True) are
            gathered; one of them only, if the other is its transpose.
        gather: gathers what is not found; see `fsdp.quantized.OperandFormat.unsharded`.
        found: those of each matrix, by direction.
    """

    recipe: Recipe
    directions: Mapping[bool, _Direction]
    gather: Callable[[_Direction], None]
    found: dict[_Direction, tuple[Quantized, ...]] = field(default_factory=dict)

    def of(self, number: int, *, is_transposed: bool) -> Quantized:
        """Returns the operand of a matrix, or of its transpose."""
        direction = self.directions.get(is_transposed)
        if direction is None:
            return self.of(number, is_transposed=not is_transposed).transposed()
        if direction not in self.found:
            self.gather(direction)
        return self.found[direction][number]

    def plain(self, number: int | None, *, is_transposed: bool) -> torch.Tensor:
        """Returns a matrix, or all of them if number is None, or transposes, in float32."""
        of_transpose = self.directions.get(True) == "forward"
        first = self.of(number or 0, is_transposed=of_transpose)
        others = [] if number is not None else self.found["forward"][1:]
        found = [one.dequantized() for one in (first, *others)]
        matrices = found[0] if number is not None else torch.stack(found)
        return matrices.mT if is_transposed != of_transpose else matrices


@dataclass(frozen=True)
class _Operands:
    """The operands of a weight, or of one matrix of a weight of experts.

    Attributes:
        key: by which graphs find what is shared; see `graph_products`.
        shared: by all of them; None in a graph.
        number: of the matrix; None: the weight has three dims.
        is_transposed: whether the last two dims are transposed.
    """

    key: torch.Tensor
    shared: _Gathered | None
    number: int | None
    is_transposed: bool = False


class QuantizedWeight(OperandTensor):
    """A weight (N, K), or (E, N, K), of which there are only operands, and no dequantized copy.

    The weight of an expert, and transposes of matrices, share the operands. An operator that takes
    no operands dequantizes, in a temporary tensor.

    Attributes:
        operands: those that are gathered at present.
    """

    operands: _Operands

    @property
    def key(self) -> torch.Tensor:
        """The tensor that a graph has instead of the weight."""
        return self.operands.key

    def __tensor_flatten__(self) -> tuple[list[str], _Context]:
        """Returns the key, and what a graph of torch.compile knows of the weight beside it."""
        own = self.operands
        return ["key"], (self.dtype, self.device, own.number, own.is_transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor],
        context: _Context,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> QuantizedWeight:
        """Returns the weight in a graph."""
        dtype, device, number, is_transposed = context
        operands = _Operands(inner["key"], None, number, is_transposed)
        return QuantizedWeight(shape, dtype, device, operands)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Returns its shape, dtype and the directions whose operands it has."""
        shared = self.operands.shared
        found = "traced" if shared is None else sorted(shared.found)
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, {found})"

    def of_output(self) -> Quantized:
        """Returns the right operand of the output's product, of two dims: (N, K)."""
        own = self.operands
        assert own.number is not None
        assert own.shared is not None
        return own.shared.of(own.number, is_transposed=own.is_transposed)

    def of_grad_input(self) -> Quantized:
        """Returns the right operand of the product of the input's gradient, of two dims: (K, N)."""
        own = self.operands
        assert own.number is not None
        assert own.shared is not None
        return own.shared.of(own.number, is_transposed=not own.is_transposed)

    def plain(self) -> torch.Tensor:
        """Implements `OperandTensor`: dequantizes."""
        own = self.operands
        if own.shared is not None:
            plain = own.shared.plain(own.number, is_transposed=own.is_transposed)
            return plain.to(self.dtype)
        return dequantized_in_graph(
            own.key, self.shape, self.dtype, self.device, own.number,
            is_transposed=own.is_transposed,
        )  # fmt: skip

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Implements `OperandTensor`; one of the experts, and transposes, share the operands."""
        own = args[0] if args and isinstance(args[0], cls) else None
        if is_product_in_graph(func):
            data, scales, weight, *others = args
            operands = weight.operands
            of_matrix = operands.number, operands.is_transposed
            return func(data, scales, operands.key, *others[:4], *of_matrix)
        if own is not None and func is _aten.select.int and own.ndim == 3 and args[1] == 0:
            number = args[2] % own.shape[0]
            return cls(own.shape[1:], own.dtype, own.device, replace(own.operands, number=number))
        if own is not None and func is _aten.transpose.int:
            first, second = sorted(dim % own.ndim for dim in args[1:])
            if (first, second) == (own.ndim - 2, own.ndim - 1):
                shape = *own.shape[:-2], own.shape[-1], own.shape[-2]
                operands = replace(own.operands, is_transposed=not own.operands.is_transposed)
                return cls(shape, own.dtype, own.device, operands)
        return super().__torch_dispatch__(func, types, args, kwargs)


def multiply_by_weight(
    left: Quantized,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    kernels: frozenset[torch.dtype],
    *,
    is_gradient: bool,
) -> torch.Tensor:
    """Returns the product of an operand and a weight, in Eager or in a graph.

    Args:
        left: (M, K) for the output, (M, N) for the gradient of the input.
        weight: (N, K).
        dtype: as of `multiply`.
        kernels: as of `multiply`.
        is_gradient: whether the product is the gradient of the input.
    """
    if torch.compiler.is_compiling():
        return multiply_in_graph(left, weight, dtype, kernels, is_gradient=is_gradient)
    right = weight.of_grad_input() if is_gradient else weight.of_output()
    return multiply(left, right, dtype, kernels)


@dataclass(frozen=True)
class _Form:
    """The operand of a matrix in one direction.

    Attributes:
        scaling: of the operand.
        is_transposed: whether the operand is the matrix' transpose.
    """

    scaling: Scaling
    is_transposed: bool

    @property
    def rows(self) -> int | None:
        """The number of the matrix' rows that share a scale; None: all, and so all ranks."""
        return self.scaling.inner if self.is_transposed else self.scaling.outer

    @property
    def columns(self) -> int | None:
        """The number of the matrix' columns that share a scale; None: all."""
        return self.scaling.outer if self.is_transposed else self.scaling.inner

    @property
    def scales_dtype(self) -> torch.dtype:
        """In which scales are sent; powers of two need no more than a byte."""
        return torch.float32 if self.scaling.scales == "float32" else torch.float8_e8m0fnu

    def operand_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns rows of a matrix, or scales of its blocks, as the operand has them, or back."""
        return matrix.t().contiguous() if self.is_transposed else matrix

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the numbers of blocks along so many rows and columns of a matrix."""
        return (
            1 if self.rows is None else rows // self.rows,
            1 if self.columns is None else columns // self.columns,
        )

    def amax(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the largest magnitudes of the blocks of rows, in the order of the operand."""
        return amax_of(self.operand_of(rows), self.scaling)

    def as_scales(self, maxima: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Returns flat magnitudes of blocks in the shape of the operand's scales."""
        first, second = self.blocks(rows, columns)
        return maxima.view(second, first) if self.is_transposed else maxima.view(first, second)

    def quantize(
        self, rows: torch.Tensor, maxima: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the elements of rows and the scales of their blocks, in the matrix' order.

        Args:
            rows: (n, K), of one matrix, or whole blocks of several.
            maxima: flat; None: those of the rows.
        """
        amax = self.amax(rows) if maxima is None else self.as_scales(maxima, *rows.shape)
        found = quantize(self.operand_of(rows), self.scaling, scales_of(amax, self.scaling))
        return self.operand_of(found.data), self.operand_of(found.scales)


@dataclass(frozen=True)
class GatheredOperand:
    """The form in which FSDP gathers a weight of products in low precision.

    A ``quantize_fn`` of ``fsdp.fully_shard`` returns it for weights of linear layers, and of
    experts (E, N, K), that `use_low_precision` or `Plan.precision` quantize with the same recipe.
    Each rank quantizes its rows, and float8 elements and scales are gathered; the products have the
    bits of quantizing the gathered weight. Where the recipe gives backward other scales than
    forward (`Float8Rowwise`, `MXFP8`), each of them gathers its own bytes. Where other axes shard
    the weight, magnitudes of blocks that their ranks share are reduced.

    Attributes:
        recipe: of the layer.
        transposed: whether products take the transposes of its matrices, as those of GPT-OSS's
            experts do; otherwise each pass would gather the bytes of the other one, too.
    """

    recipe: Recipe
    transposed: bool = False
    _forms: dict[_Direction, _Form] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the recipe."""
        check_recipe("GatheredOperand", self.recipe)
        forward, backward = self.recipe.output.right, self.recipe.grad_input.right
        forms: dict[_Direction, _Form] = {"forward": _Form(forward, self.transposed)}
        if forward != backward or not forward.is_square:
            forms["backward"] = _Form(backward, not self.transposed)
        object.__setattr__(self, "_forms", forms)

    def __str__(self) -> str:
        return f"operands of {self.recipe}" + (", transposed" if self.transposed else "")

    # As fsdp.quantized.OperandFormat says.

    @property
    def differs_in_backward(self) -> bool:
        """Whether products of backward take other bytes than those of forward."""
        return "backward" in self._forms

    def block(self, shape: Sequence[int]) -> int:
        """Returns the elements of the rows that share scales in one direction or the other."""
        rows = max(form.rows or 1 for form in self._forms.values())
        return max(1, min(rows, shape[-2]) * shape[-1])

    def shares(self, direction: _Direction) -> tuple[int, ...]:
        """Returns the dims of a matrix, -2 or -1, all of whose elements share a scale."""
        form = self._forms[direction]
        sizes = {-2: form.rows, -1: form.columns}
        return tuple(dim for dim, size in sizes.items() if size is None)

    def tensors(self, shape: Sequence[int], direction: _Direction) -> tuple[torch.Tensor, ...]:
        """Returns meta tensors like the elements and, if not all rows share, the scales."""
        form = self._forms[direction]
        rows, columns = shape
        elements = torch.empty((rows, columns), dtype=form.scaling.dtype, device="meta")
        if form.rows is None:
            return (elements,)
        scales = torch.empty(form.blocks(rows, columns), dtype=form.scales_dtype, device="meta")
        return elements, scales

    def maxima(
        self, rows: torch.Tensor, direction: _Direction, *, begin: int, shape: Sequence[int]
    ) -> torch.Tensor:
        """Returns magnitudes of the blocks of all matrices, if all rows share, or of the rows."""
        form = self._forms[direction]
        if form.rows is not None:
            return form.amax(rows).flatten()
        of_each = math.prod(form.blocks(*shape[-2:]))
        found = rows.new_zeros(math.prod(shape[:-2]), of_each, dtype=torch.float32)
        for number, part in _of_matrices(rows, begin, shape):
            found[number] = form.amax(part).flatten()
        return found.flatten()

    def quantize(
        self,
        rows: torch.Tensor,
        maxima: torch.Tensor | None,
        direction: _Direction,
        *,
        begin: int,
        shape: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:
        """Returns elements and, if not all rows share, scales."""
        form = self._forms[direction]
        if form.rows is not None:
            elements, scales = form.quantize(rows, maxima)
            return elements, scales.to(form.scales_dtype)
        assert maxima is not None
        of_each = maxima.view(math.prod(shape[:-2]), -1)
        parts = [
            form.quantize(part, of_each[number])[0]
            for number, part in _of_matrices(rows, begin, shape)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts),)

    def unsharded(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        gather: Callable[[_Direction], None],
    ) -> QuantizedWeight:
        """Returns a weight without operands."""
        directions = {form.is_transposed: name for name, form in self._forms.items()}
        number = None if len(shape) == 3 else 0
        gathered = _Gathered(self.recipe, directions, gather)
        operands = _Operands(key_of(gathered), gathered, number)
        return QuantizedWeight(shape, dtype, device, operands)

    def fill(
        self,
        weight: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        maxima: torch.Tensor | None,
        direction: _Direction,
    ) -> None:
        """Gives the matrices of a weight the operands of a direction."""
        assert isinstance(weight, QuantizedWeight)
        assert weight.operands.shared is not None
        form, (rows, columns) = self._forms[direction], weight.shape[-2:]
        if form.rows is None:
            assert maxima is not None
            of_each = maxima.view(math.prod(weight.shape[:-2]), -1)
            amaxes = [form.as_scales(one, rows, columns) for one in of_each]
            scales = [scales_of(one, form.scaling) for one in amaxes]
        else:
            blocks = gathered[1].float().view(-1, *form.blocks(rows, columns))
            scales = [form.operand_of(one) for one in blocks]
        elements = gathered[0].view(-1, rows, columns)
        weight.operands.shared.found[direction] = tuple(
            Quantized(form.operand_of(one), of_one, form.scaling)
            for one, of_one in zip(elements, scales, strict=True)
        )

    def clear(self, weight: torch.Tensor) -> None:
        """Drops the operands of a weight."""
        assert isinstance(weight, QuantizedWeight)
        assert weight.operands.shared is not None
        weight.operands.shared.found.clear()


def _of_matrices(
    rows: torch.Tensor, begin: int, shape: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the rows of each matrix, and its number.

    Args:
        rows: (n, K), consecutive ones of a weight.
        begin: the number of the first.
        shape: of the weight.
    """
    done = 0
    while done < len(rows):
        number, first = divmod(begin + done, shape[-2])
        count = min(shape[-2] - first, len(rows) - done)
        yield number, rows[done : done + count]
        done += count
