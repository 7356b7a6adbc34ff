"""The blocks that matrices are cut into, each with preconditioners of its own.

Note: the words of this package, beside those of `fsdp.optim.owned.matrices`.
    block: at most `block_size` rows and columns of a matrix.
    strip: the blocks beside one another, that is some whole rows: what travels to an owner. Rows
        lie together in storage, and columns do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdp.optim.owned.jobs import WorkOf
from fsdp.optim.owned.matrices import Matrix

__all__ = ["cut", "strips_of", "work_by_shape"]


def cut(length: int, size: int) -> list[range]:
    """So many rows or columns, at most `size` at a time; the last ones may be fewer."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def strips_of(matrices: Sequence[Matrix], size: int) -> list[Matrix]:
    """The strips of matrices, one matrix after the other: of what inner axes leave of them."""
    return [matrix.strip(rows) for matrix in matrices for rows in cut(matrix.base[0], size)]


def work_by_shape(size: int, frequency: int) -> WorkOf:
    """Multiplications of a step on a strip, about, by its shape.

    Of a block of r x c: the gradient's two products with itself, and the rotation of gradient and
    mean and of the update back; every `frequency` steps two products and two QR decompositions.

    Args:
        size: of blocks, at most.
        frequency: of new bases, in steps.
    """
    return partial(_work, size, frequency)


def _work(size: int, frequency: int, shape: tuple[int, int]) -> int:
    rows, total = shape[0], 0
    for columns in map(len, cut(shape[1], size)):
        products = 4 * rows * columns * (rows + columns)
        total += products + 7 * (rows**3 + columns**3) // (3 * frequency)
    return total
