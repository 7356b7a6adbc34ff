"""The orders in which a group's tensors may be placed in the buffer."""

import operator
from collections.abc import Callable, Sequence

from ragged_shard.planner.spec import TensorSpec

#: The names that ``plan_layout`` takes. "best" is a search, in search.py.
NAMES = ("given", "block", "shape", "best")

#: A name, a permutation of the indices of the specs, or a function that returns one for the specs.
TensorOrder = str | Sequence[int] | Callable[[tuple[TensorSpec, ...]], Sequence[int]]


def as_given(specs: Sequence[TensorSpec]) -> list[int]:
    """Keeps the order of the specs."""
    return list(range(len(specs)))


def by_block(specs: Sequence[TensorSpec]) -> list[int]:
    """Sorts by block, then size, largest first: tensors of equal blocks share their padding."""
    return sorted(range(len(specs)), key=lambda i: (-specs[i].block, -specs[i].numel, i))


def by_shape(specs: Sequence[TensorSpec]) -> list[int]:
    """Sorts by shape, dim by dim, largest first; a missing shape counts as one dim of its size."""
    shapes = [spec.shape if spec.shape is not None else (spec.numel,) for spec in specs]
    return sorted(range(len(specs)), key=lambda i: shapes[i], reverse=True)  # stable


def by_size(specs: Sequence[TensorSpec]) -> list[int]:
    """Sorts by size, then block, largest first."""
    return sorted(range(len(specs)), key=lambda i: (-specs[i].numel, -specs[i].block, i))


#: The functions of the names "given", "block" and "shape".
SORTS: dict[str, Callable[[Sequence[TensorSpec]], list[int]]] = {
    "given": as_given,
    "block": by_block,
    "shape": by_shape,
}


def permutation(order: TensorOrder, specs: tuple[TensorSpec, ...]) -> tuple[int, ...]:
    """Returns the indices of ``specs`` in the order of the buffer, for any order but "best".

    Args:
        order: "given", "block" (``by_block``), "shape" (``by_shape``), each of
            ``range(len(specs))`` once, or a function that returns such a permutation.
        specs: the tensors.

    Raises:
        ValueError: ``order`` is an unknown name, or not a permutation.
    """
    if isinstance(order, str):
        if order not in SORTS:
            raise ValueError(
                f"order: expected one of {', '.join(NAMES)}, a permutation of the indices of the "
                f"specs, or a function of the specs that returns one, got {order!r}"
            )
        return tuple(SORTS[order](specs))
    indices: object = order(specs) if callable(order) else order
    what = "order's result" if callable(order) else "order"
    if isinstance(indices, str) or not isinstance(indices, Sequence):
        raise ValueError(f"{what}: expected a sequence of indices of the specs, got {indices!r}")
    for index in indices:
        if not hasattr(index, "__index__"):
            raise ValueError(f"{what}: expected integers, got {index!r} among them")
    indices = tuple(map(operator.index, indices))
    if sorted(indices) != list(range(len(specs))):
        wrong = sorted(set(indices) ^ set(range(len(specs)))) or sorted(
            index for index in set(indices) if list(indices).count(index) > 1
        )
        raise ValueError(
            f"{what}: expected each of 0 to {len(specs) - 1} once, got {len(indices)} indices, of "
            f"which {wrong[:5]} are missing, unknown or repeated"
        )
    return indices
