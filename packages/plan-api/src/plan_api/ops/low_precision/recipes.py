"""Recipes: how the operands of a linear layer's matrix products are quantized."""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch

__all__ = [
    "MXFP8",
    "RECIPES",
    "Float8Block",
    "Float8Rowwise",
    "Float8Tensorwise",
    "Operands",
    "ProductChoice",
    "Recipe",
    "Scaling",
    "check_recipe",
    "recipe_from_json",
]

ProductChoice: TypeAlias = Literal["auto", "kernel", "reference"]
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Scaling:
    """How one operand of a product is quantized: a matrix (outer, inner), summed over inner.

    Attributes:
        outer: the number of consecutive rows that share a scale; None: all.
        inner: the number of consecutive elements of a row that share a scale; None: all.
        dtype: of elements.
        scales: ``"float32"``; ``"power-of-2"``, the least that keeps all elements in the range of
            the dtype; ``"e8m0"``, the power of two of the OCP MX specification (1.0, section 6.3),
            with which the largest elements of a block may be clamped.
    """

    outer: int | None
    inner: int | None
    dtype: torch.dtype = _E4M3
    scales: Literal["float32", "power-of-2", "e8m0"] = "float32"

    @property
    def is_tensorwise(self) -> bool:
        """Whether the operand has one scale."""
        return self.outer is None and self.inner is None

    @property
    def is_square(self) -> bool:
        """Whether the transpose of the quantized operand is the quantized transpose."""
        return self.outer == self.inner


@dataclass(frozen=True)
class Operands:
    """The scalings of a product's operands, (M, K) and (N, K)."""

    left: Scaling
    right: Scaling


@dataclass(frozen=True)
class Recipe(ABC):
    """The recipe of a linear layer with tokens (M, K) and a weight (N, K).

    Attributes:
        products: what computes: ``"auto"``, kernels where the device has them, otherwise the
            reference, with a warning; ``"kernel"``, which refuses a device without;
            ``"reference"``.
    """

    name: ClassVar[str] = ""

    products: ProductChoice = "auto"

    def __post_init__(self) -> None:
        if self.products not in get_args(ProductChoice):
            expected = ", ".join(map(repr, get_args(ProductChoice)))
            raise ValueError(
                f"{type(self).__name__}: products: expected {expected}, got {self.products!r}"
            )

    @property
    @abstractmethod
    def output(self) -> Operands:
        """Of tokens (M, K) and the weight (N, K)."""

    @property
    @abstractmethod
    def grad_input(self) -> Operands:
        """Of the output's gradient (M, N) and the transposed weight (K, N)."""

    @property
    @abstractmethod
    def grad_weight(self) -> Operands:
        """Of the output's transposed gradient (N, M) and transposed tokens (K, M)."""

    @property
    def feature_block(self) -> int:
        """The number of features that share a scale, which features are a multiple of."""
        return 1

    def to_json(self) -> dict[str, Any]:
        """Returns the name and the fields that are no defaults."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        default = type(self)()
        return {"recipe": self.name} | {
            name: value for name, value in fields.items() if value != getattr(default, name)
        }

    def __str__(self) -> str:
        return ", ".join(
            str(value) if name == "recipe" else f"{name}={value}"
            for name, value in self.to_json().items()
        )


@dataclass(frozen=True)
class Float8Tensorwise(Recipe):
    """One float32 scale per tensor; gradients of outputs are float8_e5m2 (torchao's tensorwise)."""

    name = "float8-tensorwise"
    output = Operands(Scaling(None, None), Scaling(None, None))
    grad_input = Operands(Scaling(None, None, _E5M2), Scaling(None, None))
    grad_weight = Operands(Scaling(None, None, _E5M2), Scaling(None, None))


_ROW = Scaling(1, None, _E4M3, "power-of-2")


@dataclass(frozen=True)
class Float8Rowwise(Recipe):
    """One scale per row of each operand, a power of two (torchao's rowwise)."""

    name = "float8-rowwise"
    output = grad_input = grad_weight = Operands(_ROW, _ROW)


@dataclass(frozen=True)
class Float8Block(Recipe):
    """One float32 scale per block (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    Weights have square blocks; tokens and gradients of outputs have blocks of one row.

    Attributes:
        block: the size of blocks.
    """

    name = "float8-block"

    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.block) is not int or self.block < 1:
            raise ValueError(
                f"Float8Block: block: expected a number of elements, such as 128, got "
                f"{self.block!r}"
            )

    @property
    def output(self) -> Operands:
        """See `Recipe`."""
        return Operands(Scaling(1, self.block), Scaling(self.block, self.block))

    @property
    def grad_input(self) -> Operands:
        """See `Recipe`."""
        return self.output

    @property
    def grad_weight(self) -> Operands:
        """See `Recipe`."""
        return Operands(Scaling(1, self.block), Scaling(1, self.block))

    @property
    def feature_block(self) -> int:
        """See `Recipe`."""
        return self.block


_MX = Scaling(1, 32, _E4M3, "e8m0")


@dataclass(frozen=True)
class MXFP8(Recipe):
    """One power of two per 32 elements of a row (OCP Microscaling Formats 1.0)."""

    name = "mxfp8"
    output = grad_input = grad_weight = Operands(_MX, _MX)
    feature_block = 32


RECIPES: Mapping[str, type[Recipe]] = {
    one.name: one for one in (Float8Tensorwise, Float8Rowwise, Float8Block, MXFP8)
}


def check_recipe(what: str, recipe: Any) -> None:
    """Refuses what is no recipe.

    Args:
        what: begins the message.
        recipe: any value.

    Raises:
        ValueError: names the recipes.
    """
    if not isinstance(recipe, tuple(RECIPES.values())):
        expected = ", ".join(f"{one.__name__}()" for one in RECIPES.values())
        raise ValueError(f"{what}: recipe: expected one of {expected}, got {recipe!r}")


def recipe_from_json(what: str, value: Any) -> Recipe:
    """Reads what `Recipe.to_json` returned.

    Args:
        what: begins messages.
        value: any.

    Raises:
        ValueError: it is something else, or there is no such recipe or field.
    """
    given = dict(value) if isinstance(value, Mapping) else {}
    name = given.pop("recipe", value)
    if name not in tuple(RECIPES):
        near = difflib.get_close_matches(str(name), RECIPES, 1)
        suggestion = f"; did you mean {near[0]!r}?" if near else ""
        expected = " or ".join(map(repr, RECIPES))
        raise ValueError(f"{what}: recipe: expected {expected}, got {name!r}{suggestion}")
    known = [field.name for field in dataclasses.fields(RECIPES[name])]
    unknown = [field for field in given if field not in known]
    if unknown:
        raise ValueError(
            f"{what}: recipe {name!r}: expected the fields {', '.join(known)}, got {unknown[0]!r}"
        )
    return RECIPES[name](**given)
