"""The blocks that matrices are divided into, each with its own preconditioners, and their state.

Note: terminology, besides that of `fsdp.optim.matrix.matrices`.
    block: at most `block_size` rows and columns of a matrix.
    strip: full rows of a matrix, which have one owner and are sent to it as one matrix: all blocks
        of the same rows. Rows are contiguous in storage, and columns are not. A matrix of which
        inner axes shard the rows is one strip, as its rows are gathered together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from fsdp.optim.matrix.assignment import CostFunction, MatrixTask
from fsdp.optim.matrix.matrices import Matrix
from fsdp.optim.matrix.state import zeros_on_owner
from fsdp.optim.soap.eigenbasis import BlockState
from fsdp.optim.tensors import local_of

__all__ = [
    "MatrixBlock", "block_ranges", "block_state", "blocks_of", "new_state", "soap_cost",
    "split_into_strips",
]  # fmt: skip

_STATE_NAMES = [field.name for field in fields(BlockState)]


@dataclass(frozen=True)
class MatrixBlock:
    """The rows and columns of a block in its strip."""

    rows: range
    columns: range

    def part_of(self, strip: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the block, as a view of a tensor of the strip's shape."""
        rows, columns = self.rows, self.columns
        return strip[rows.start : rows.stop, columns.start : columns.stop]


def block_ranges(length: int, block_size: int) -> list[range]:
    """Divides rows or columns into ranges of `block_size`; the last one may be shorter."""
    return [range(start, min(start + block_size, length)) for start in range(0, length, block_size)]


def blocks_of(shape: tuple[int, int], block_size: int) -> list[MatrixBlock]:
    """Returns the blocks of a strip or matrix of this shape, those of the first rows first."""
    return [
        MatrixBlock(rows, columns)
        for rows in block_ranges(shape[0], block_size)
        for columns in block_ranges(shape[1], block_size)
    ]


def split_into_strips(matrices: Sequence[Matrix], block_size: int) -> list[Matrix]:
    """Returns the strips of matrices, in the order of the matrices."""
    strips: list[Matrix] = []
    for matrix in matrices:
        if matrix.has_all_rows:
            strips += map(matrix.row_strip, block_ranges(matrix.shape[0], block_size))
        else:
            strips.append(matrix)
    return strips


def soap_cost(block_size: int, precondition_frequency: int) -> CostFunction:
    """Returns a function that estimates the multiplications of a step by the shape of a strip.

    For a block of r x c these are two products of the gradient with itself, the rotations of the
    gradient and its mean, and the rotation of the update back; and, every `precondition_frequency`
    steps, two products and two QR decompositions.

    Args:
        block_size: maximum rows and columns of a block.
        precondition_frequency: steps between updates of the bases.
    """
    return partial(_soap_cost, block_size, precondition_frequency)


def _soap_cost(block_size: int, precondition_frequency: int, shape: tuple[int, int]) -> int:
    total = 0
    for block in blocks_of(shape, block_size):
        rows, columns = len(block.rows), len(block.columns)
        products = 4 * rows * columns * (rows + columns)
        total += products + 7 * (rows**3 + columns**3) // (3 * precondition_frequency)
    return total


def new_state(
    param: torch.Tensor, strips: Sequence[MatrixTask], block_size: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Creates the state of a parameter before its first step.

    It has "step", and for block n "left.n", "right.n" and so on, one tensor for each field of
    `BlockState`. On the axis that shards the parameter, the placement of each is
    `RaggedShard.owned_by`. Axes that shard matrices replicate it, as all their ranks gather the
    matrix. Axes whose ranks have matrices of their own, such as other experts, have other blocks on
    each rank, and block n of all their ranks is stacked.

    Args:
        param: the parameter.
        strips: strips of the parameter and their owners.
        block_size: maximum rows and columns of a block.
        device: device of the tensors.
    """
    state = {"step": torch.tensor(0.0)}
    block = 0
    for strip in strips:
        for one in blocks_of(strip.matrix.shape, block_size):
            rows, columns = len(one.rows), len(one.columns)
            shapes = {
                "left": (rows, rows), "right": (columns, columns),
                "left_basis": (rows, rows), "right_basis": (columns, columns),
                "exp_avg": (rows, columns), "exp_avg_sq": (rows, columns),
            }  # fmt: skip
            for name in _STATE_NAMES:
                value = zeros_on_owner(param, strip, shapes[name], device)
                if name.endswith("basis"):
                    local = local_of(value)
                    local.copy_(torch.eye(len(local), shapes[name][1], device=device))
                state[_key(name, block)] = value
            block += 1
    return state


def block_state(state: dict[str, torch.Tensor], block: int) -> BlockState:
    """Returns the local tensors of a block on its owner; writes to them change the state."""
    return BlockState(**{name: local_of(state[_key(name, block)]) for name in _STATE_NAMES})


def _key(name: str, block: int) -> str:
    return f"{name}.{block}"
