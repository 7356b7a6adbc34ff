"""``TensorSpec``: a tensor's size, and the blocks that no shard boundary may split."""

import operator
from dataclasses import dataclass
from math import prod

#: The largest number of elements that a tensor, a group or a buffer may have: an int64.
MOST_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a group.

    Attributes:
        name: used by errors and explanations; names need not differ.
        numel: the number of elements; may be 0.
        block: elements of a block, the run of the flattened storage that stays on one rank.
            Blocks are counted from the tensor's first element, and the last one may be shorter.
            1 allows a boundary anywhere; ``numel`` gives the whole tensor to one owner.
        shape: the tensor's shape, where there is one; the order "shape" sorts by it.

    Raises:
        ValueError: a size is negative, no integer or beyond an int64, the block is below 1 or
            larger than a tensor that is not empty (callers clamp it), or the shape has another
            number of elements than ``numel``.
    """

    name: str
    numel: int
    block: int = 1
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Validates the values, and converts sizes to plain ints and the shape to a tuple."""
        if not isinstance(self.name, str):
            raise ValueError(f"TensorSpec name: expected a string, got {self.name!r}")
        who = f"TensorSpec {self.name!r}"
        for name, least in (("numel", 0), ("block", 1)):
            value = getattr(self, name)
            size = check_size(f"{who} {name}", value, least=least)
            if size is not value:
                object.__setattr__(self, name, size)
        if self.block > self.numel > 0:
            raise ValueError(
                f"{who} block: expected at most {self.numel}, the elements of the tensor, got "
                f"{self.block}; pass min(block, numel)"
            )
        if self.shape is None:
            return
        if not isinstance(self.shape, tuple | list):
            raise ValueError(f"{who} shape: expected a tuple of integers, got {self.shape!r}")
        shape = tuple(check_size(f"{who} shape", size, least=0) for size in self.shape)
        if prod(shape) != self.numel:
            raise ValueError(
                f"{who} shape: expected a shape of numel={self.numel} elements, got {shape} of "
                f"{prod(shape)}"
            )
        object.__setattr__(self, "shape", shape)


def check_size(what: str, value: int, *, least: int) -> int:
    """Returns ``value`` as an int if it is an integer between ``least`` and the largest int64.

    Args:
        what: names the value in the error.
        value: anything with ``__index__`` is an integer; a float is not.
        least: the smallest value allowed.

    Raises:
        ValueError: it is not such an integer.
    """
    try:
        size: int = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{what}: expected an integer, got {value!r} of type {type(value).__name__}; pass "
            f"int(..)"
        ) from None
    if not least <= size <= MOST_ELEMENTS:
        raise ValueError(f"{what}: expected {least} to 2**63 - 1, got {size}")
    return size
