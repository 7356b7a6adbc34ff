"""Which of a model's matrices have blocks of whole rows, and the planner's specs that follow."""

import re
from collections.abc import Iterator

from ragged_shard.planner.model import Group, Model, Parameter
from ragged_shard.planner.spec import TensorSpec


def resolve_target(model: Model, target: str | None) -> str:
    """The target that is meant, once it is known to match a matrix of the model.

    Args:
        model: The model.
        target: ``"experts"``, the matrices of routed experts; ``"all"``, every matrix; or a
            regular expression, searched for in ``<group>.<parameter>``. By default the experts
            where the model has any, else every matrix.

    Raises:
        ValueError: The target matches no matrix, or is no regular expression.
    """
    if target is None:
        target = "experts" if any(_matched(model, "experts")) else "all"
    try:
        found = any(_matched(model, target))
    except re.error as error:
        raise ValueError(f"{target!r} is no regular expression: {error}") from error
    if not found:
        wanted = "a regular expression that matches a matrix's name"
        raise ValueError(f"{model.name}: no matrix matches {target!r}; give 'all', or {wanted}")
    return target


def specs_of(group: Group, rows: int, target: str) -> tuple[TensorSpec, ...]:
    """A group as the planner takes it: blocks of whole rows where they apply, else of one element.

    Args:
        group: The group; names, shapes and order are kept.
        rows: Rows per block. A row is a matrix's last dim, of a stack of matrices too, so that
            blocks may run from one expert into the next; the last block of a tensor may be short.
        target: As ``resolve_target`` returns it.
    """
    return tuple(
        TensorSpec(
            parameter.name, parameter.numel, _block(parameter, rows, hit=hit), parameter.shape
        )
        for parameter, hit in zip(group.parameters, _hits(group, target), strict=True)
    )


def _block(parameter: Parameter, rows: int, *, hit: bool) -> int:
    return max(1, min(rows * parameter.shape[-1], parameter.numel)) if hit else 1


def _matched(model: Model, target: str) -> Iterator[bool]:
    for group in model.groups:
        yield from _hits(group, target)


def _hits(group: Group, target: str) -> Iterator[bool]:
    pattern = None if target in ("experts", "all") else re.compile(target)
    for parameter in group.parameters:
        if parameter.kind == "other":
            yield False
        elif pattern is None:
            yield target == "all" or parameter.kind == "expert"
        else:
            yield pattern.search(f"{group.name}.{parameter.name}") is not None
