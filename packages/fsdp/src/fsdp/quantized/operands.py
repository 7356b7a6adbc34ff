"""Weights that are gathered as the operands of low-precision products, and never dequantized.

Note: the terms of this module.
    operand: a quantized weight as a matrix product takes it, codes and scales.
    direction: in which a product uses it. A format may have other scales, and so other codes, for
        the gradient of the input (backward) than for the output (forward); each all-gather has what
        modules compute with next, and where parameters are unsharded only what is missing.
    matrix: a weight (N, K), or one of those of experts (E, N, K), whose rows follow each other. No
        two matrices share a scale.
    maxima: the largest magnitudes of blocks that several ranks have elements of, because they shard
        the rows (fully_shard does), or other axes do the rows or columns; they are reduced over the
        ranks before these quantize their rows. Scales of blocks of whole columns are then known to
        all ranks, and those of other blocks are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch

__all__ = ["Direction", "OperandFormat", "TensorFormat"]

Direction: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True)
class TensorFormat:
    """The shape and dtype of a tensor that is gathered."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class OperandFormat(Protocol):
    """How a weight (N, K) or (E, N, K) is quantized on its shard; a ``quantize_fn`` may return one.

    Its ``__str__`` is the same on every rank, which compare it. It is used for one weight.
    """

    @property
    def differs_in_backward(self) -> bool:
        """Whether products of backward take other codes or scales than those of forward."""
        ...

    def block(self, shape: Sequence[int]) -> int:
        """Returns the elements of a run that no rank boundary may split: one or more rows."""
        ...

    def shares(self, direction: Direction) -> tuple[int, ...]:
        """Returns the dims of a matrix, -2 or -1, all of whose elements share a scale."""
        ...

    def tensors(self, shape: Sequence[int], direction: Direction) -> tuple[torch.Tensor, ...]:
        """Returns meta tensors like those that rows (n, K) are sent as.

        Those of all ranks are concatenated along dim 0.
        """
        ...

    def maxima(
        self, rows: torch.Tensor, direction: Direction, *, begin: int, shape: Sequence[int]
    ) -> torch.Tensor:
        """Returns the magnitudes of blocks that `shares` says ranks share: fp32 (m,).

        Where all rows of a matrix share, m is the same for any number of rows, and those of blocks
        without rows are zeros.

        Args:
            rows: (n, K), of the dtype that is quantized.
            direction: of the products.
            begin: the number of the first row.
            shape: of the weight, this rank's part along axes of other parallelism.
        """
        ...

    def quantize(
        self,
        rows: torch.Tensor,
        maxima: torch.Tensor | None,
        direction: Direction,
        *,
        begin: int,
        shape: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that rows are sent as.

        Args:
            rows: as of `maxima`; one at least.
            maxima: the largest of the ranks; None: no two ranks share a block.
            direction: of the products.
            begin: as of `maxima`.
            shape: as of `maxima`.
        """
        ...

    def unsharded(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        gather: Callable[[Direction], None],
    ) -> torch.Tensor:
        """Returns a tensor without memory of its own, which `fill` gives operands.

        Args:
            shape: of the weight, this rank's part along axes of other parallelism.
            dtype: in which modules compute.
            device: that computes.
            gather: gathers the operand of a direction that has none, on all ranks; raises
                RuntimeError where the weight is sharded.
        """
        ...

    def fill(
        self,
        weight: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        maxima: torch.Tensor | None,
        direction: Direction,
    ) -> None:
        """Makes gathered tensors the operand of a direction; called after each all-gather.

        Args:
            weight: of `unsharded`.
            gathered: as of `tensors`, of all rows.
            maxima: as of `quantize`.
            direction: of the products.
        """
        ...

    def clear(self, weight: torch.Tensor) -> None:
        """Drops the operands, whose memory is freed."""
        ...
