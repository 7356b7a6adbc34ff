"""The orders in which a group's tensors may lie in the buffer."""

import operator
from collections.abc import Callable, Sequence

from ragged_shard.planner.spec import TensorSpec

#: The names that ``plan_layout`` takes. "best" is a search, in best.py.
NAMES = ("given", "block", "shape", "best")

#: A name, a permutation of the places in the specs, or what returns one for the specs.
Order = str | Sequence[int] | Callable[[tuple[TensorSpec, ...]], Sequence[int]]


def as_given(specs: Sequence[TensorSpec]) -> list[int]:
    """As the specs come."""
    return list(range(len(specs)))


def by_block(specs: Sequence[TensorSpec]) -> list[int]:
    """Largest block first, then largest tensor: tensors of equal blocks share their padding."""
    return sorted(range(len(specs)), key=lambda i: (-specs[i].block, -specs[i].numel, i))


def by_shape(specs: Sequence[TensorSpec]) -> list[int]:
    """Largest shape first, dim by dim; one without a shape counts as one dim of its size."""
    shapes = [spec.shape if spec.shape is not None else (spec.numel,) for spec in specs]
    return sorted(range(len(specs)), key=lambda i: shapes[i], reverse=True)  # stable


def by_size(specs: Sequence[TensorSpec]) -> list[int]:
    """Largest tensor first, then largest block."""
    return sorted(range(len(specs)), key=lambda i: (-specs[i].numel, -specs[i].block, i))


#: What "given", "block" and "shape" stand for.
SORTS: dict[str, Callable[[Sequence[TensorSpec]], list[int]]] = {
    "given": as_given,
    "block": by_block,
    "shape": by_shape,
}


def permutation(order: Order, specs: tuple[TensorSpec, ...]) -> tuple[int, ...]:
    """Return places in ``specs`` in the order of the buffer, for any order but "best".

    Args:
        order: "given", "block" (``by_block``), "shape" (``by_shape``), each of
            ``range(len(specs))`` once, or a function that returns such a permutation.
        specs: the tensors.

    Raises:
        ValueError: ``order`` is an unknown name, or no permutation.
    """
    if isinstance(order, str):
        if order not in SORTS:
            raise ValueError(
                f"order: got {order!r}, wants one of {', '.join(NAMES)}, a permutation of the "
                "specs' places, or a function of the specs that returns one"
            )
        return tuple(SORTS[order](specs))
    places: object = order(specs) if callable(order) else order
    what = "order's result" if callable(order) else "order"
    if isinstance(places, str) or not isinstance(places, Sequence):
        raise ValueError(f"{what}: got {places!r}, wants a sequence of places in the specs")
    for place in places:
        if not hasattr(place, "__index__"):
            raise ValueError(f"{what}: got {place!r} among the places, wants integers")
    places = tuple(map(operator.index, places))
    if sorted(places) != list(range(len(specs))):
        wrong = sorted(set(places) ^ set(range(len(specs)))) or sorted(
            place for place in set(places) if list(places).count(place) > 1
        )
        raise ValueError(
            f"{what}: got {len(places)} places, of which {wrong[:5]} are missing, unknown or "
            f"double, wants each of 0 to {len(specs) - 1} once"
        )
    return places
