"""What the planner is told of a tensor: its size, and the blocks that no shard may cut."""

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
        """Check the values, and make the shape a plain tuple."""
        if not isinstance(self.name, str):
            raise ValueError(f"TensorSpec name: got {self.name!r}, wants a string")
        who = f"TensorSpec {self.name!r}"
        check_size(f"{who} numel", self.numel, least=0)
        check_size(f"{who} block", self.block, least=1)
        if self.block > self.numel > 0:
            raise ValueError(
                f"{who} block: got {self.block} for a tensor of {self.numel} elements, wants at "
                f"most {self.numel}; pass min(block, numel)"
            )
        if self.shape is None:
            return
        if not isinstance(self.shape, tuple | list):
            raise ValueError(f"{who} shape: got {self.shape!r}, wants a tuple of integers")
        for size in self.shape:
            check_size(f"{who} shape", size, least=0)
        if prod(self.shape) != self.numel:
            raise ValueError(
                f"{who} shape: got {tuple(self.shape)} of {prod(self.shape)} elements, wants "
                f"numel={self.numel} of them"
            )
        object.__setattr__(self, "shape", tuple(self.shape))


def check_size(what: str, value: object, *, least: int) -> int:
    """Return ``value`` if it is an integer between ``least`` and the largest int64.

    Args:
        what: names the value in the error.
        value: any object.
        least: the smallest value that is right.

    Raises:
        ValueError: it is not; booleans and floats are no integers here.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"{what}: got {value!r} of type {type(value).__name__}, wants an integer; pass int(..)"
        )
    if not least <= value <= MOST_ELEMENTS:
        raise ValueError(f"{what}: got {value}, wants {least} to 2**63 - 1")
    return value
