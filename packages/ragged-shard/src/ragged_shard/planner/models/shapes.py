"""A model as FSDP sees it: groups of named parameters, of which only the shapes matter."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from ragged_shard.planner.spec import TensorSpec

#: "expert": a matrix of a routed expert, or those of many experts stacked in one tensor. "matrix":
#: any other matrix. "other": vectors, and stacked vectors such as the experts' biases.
ParameterKind = Literal["expert", "matrix", "other"]

#: Routed experts as tensors of their own, or stacked in one tensor per kind of matrix.
ExpertLayout = Literal["separate", "stacked"]


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter of a model: its name within its group, its shape and its kind."""

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind = "matrix"

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The parameters that one call of ``fully_shard`` puts into one buffer, in its order."""

    name: str
    parameters: tuple[ParameterShape, ...]

    @property
    def numel(self) -> int:
        """The number of elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model's groups: one per transformer layer, then ``root`` with the remaining parameters."""

    name: str
    groups: tuple[ParameterGroup, ...]

    @property
    def numel(self) -> int:
        """The number of elements of all its groups: the published number of parameters."""
        return sum(group.numel for group in self.groups)

    def only(self, name: str) -> "ModelShapes":
        """Returns the same model with one group only.

        Raises:
            ValueError: No group has this name.
        """
        groups = tuple(group for group in self.groups if group.name == name)
        if not groups:
            first, last = self.groups[0].name, self.groups[-1].name
            raise ValueError(
                f"{self.name}: expected one of its {len(self.groups)} groups, from {first!r} to "
                f"{last!r}, got {name!r}"
            )
        return ModelShapes(self.name, groups)


def make_parameter(name: str, shape: tuple[int, ...]) -> ParameterShape:
    """Returns a parameter of a Hugging Face model; its kind follows from its name and shape."""
    if len(shape) < 2 or name.endswith("bias"):
        return ParameterShape(name, shape, "other")
    return ParameterShape(name, shape, "expert" if ".experts." in name else "matrix")


def add_mtp_layers(model: ModelShapes, count: int) -> ModelShapes:
    """Adds layers of multi-token prediction, each a group of its own.

    Such a layer is one more of the last kind, with two norms and a projection before it and a norm
    after it; it shares embedding and head with the model. Names are those of the checkpoint, see
    README_WEIGHTS.md of deepseek-ai/DeepSeek-V3.
    """
    *layers, root = model.groups
    last = layers[-1].parameters
    norm = next(p for p in last if p.name == "input_layernorm.weight")
    (hidden,) = norm.shape
    parameters = (
        ParameterShape("enorm.weight", norm.shape, "other"),
        ParameterShape("hnorm.weight", norm.shape, "other"),
        ParameterShape("eh_proj.weight", (hidden, 2 * hidden)),
        *last,
        ParameterShape("shared_head.norm.weight", norm.shape, "other"),
    )
    extra = [
        ParameterGroup(f"layers.{layer}", parameters)
        for layer in range(len(layers), len(layers) + count)
    ]
    return ModelShapes(model.name, (*layers, *extra, root))


def resolve_target(model: ModelShapes, target: str | None) -> str:
    """Resolves which matrices have blocks of rows, and checks that the model has any.

    Args:
        model: The model.
        target: ``"experts"``, the matrices of routed experts; ``"all"``, every matrix; or a
            regular expression, searched for in ``<group>.<parameter>``. By default the experts
            where the model has any, otherwise every matrix.

    Raises:
        ValueError: The target matches no matrix, or is not a regular expression.
    """
    if target is None:
        target = "experts" if any(_matches(model, "experts")) else "all"
    try:
        matched = any(_matches(model, target))
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {target!r}: {error}") from error
    if not matched:
        raise ValueError(
            f"{model.name}: no matrix matches {target!r}; pass 'all', or a regular expression that "
            f"matches a matrix's name"
        )
    return target


def specs_of(group: ParameterGroup, rows: int, target: str) -> tuple[TensorSpec, ...]:
    """Returns a group's specs: with blocks of rows where they apply, otherwise of one element.

    Args:
        group: The group; names, shapes and order are preserved.
        rows: Rows per block. A row is a matrix's last dim, also in a stack of matrices, so blocks
            may extend from one expert into the next; the last block of a tensor may be shorter.
        target: As ``resolve_target`` returns it.
    """
    return tuple(
        TensorSpec(
            parameter.name,
            parameter.numel,
            _block(parameter, rows) if matches else 1,
            parameter.shape,
        )
        for parameter, matches in zip(group.parameters, _group_matches(group, target), strict=True)
    )


def _block(parameter: ParameterShape, rows: int) -> int:
    return max(1, min(rows * parameter.shape[-1], parameter.numel))


def _matches(model: ModelShapes, target: str) -> Iterator[bool]:
    for group in model.groups:
        yield from _group_matches(group, target)


def _group_matches(group: ParameterGroup, target: str) -> Iterator[bool]:
    pattern = None if target in ("experts", "all") else re.compile(target)
    for parameter in group.parameters:
        if parameter.kind == "other":
            yield False
        elif pattern is None:
            yield target == "all" or parameter.kind == "expert"
        else:
            yield pattern.search(f"{group.name}.{parameter.name}") is not None
