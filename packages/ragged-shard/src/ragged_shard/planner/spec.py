"""What the planner is told of a tensor: its size, and the blocks that no shard may cut."""

import operator
from dataclasses import dataclass
from math import prod

#: The largest number of elements that a tensor, a group or a buffer may have: an int64.
MOST_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a group.

    Attributes:
        name: what errors and explanations call it; names need not differ.
        numel: number of elements; may be 0.
        block: elements of a block, the run of the flattened storage that stays on one rank.
            Blocks are counted from the tensor's first element, and the last one may be shorter.
            1 lets a boundary fall anywhere; ``numel`` gives the whole tensor to one owner.
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
        """Check the values, and make sizes plain ints and the shape a plain tuple."""
        if not isinstance(self.name, str):
            raise ValueError(f"TensorSpec name: got {self.name!r}, wants a string")
        who = f"TensorSpec {self.name!r}"
        for name, least in (("numel", 0), ("block", 1)):
            given = getattr(self, name)
            size = check_size(f"{who} {name}", given, least=least)
            if size is not given:
                object.__setattr__(self, name, size)
        if self.block > self.numel > 0:
            raise ValueError(
                f"{who} block: got {self.block} for a tensor of {self.numel} elements, wants at "
                f"most {self.numel}; pass min(block, numel)"
            )
        if self.shape is None:
            return
        if not isinstance(self.shape, tuple | list):
            raise ValueError(f"{who} shape: got {self.shape!r}, wants a tuple of integers")
        shape = tuple(check_size(f"{who} shape", size, least=0) for size in self.shape)
        if prod(shape) != self.numel:
            raise ValueError(
                f"{who} shape: got {shape} of {prod(shape)} elements, wants "
                f"numel={self.numel} of them"
            )
        object.__setattr__(self, "shape", shape)


def check_size(what: str, value: int, *, least: int) -> int:
    """Return ``value`` as an int if it is an integer between ``least`` and the largest int64.

    Args:
        what: names the value in the error.
        value: what has ``__index__`` is an integer, and a float is none.
        least: the smallest value that is right.

    Raises:
        ValueError: it is not.
    """
    try:
        size: int = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{what}: got {value!r} of type {type(value).__name__}, wants an integer; pass int(..)"
        ) from None
    if not least <= size <= MOST_ELEMENTS:
        raise ValueError(f"{what}: got {size}, wants {least} to 2**63 - 1")
    return size
