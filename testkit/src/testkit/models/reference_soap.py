"""SOAP on one device, written from the paper: the bits that a sharded one has to reproduce.

Algorithms 3 and 4 of arXiv 2409.11321, on blocks of matrices; it knows nothing of ranks. The
paper's L, R, Q_L, Q_R, M and V are `left`, `right`, `left_basis`, `right_basis`, `mean`, `squares`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from testkit.models.matrix_net import matrices_of

__all__ = ["ReferenceSoap", "ReferenceSoapAndAdamW"]


class _PreconditionedBlock:
    """Preconditioners and moments of a part of a matrix."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype)

        self.left, self.right = zeros(rows, rows), zeros(columns, columns)
        self.left_basis, self.right_basis = zeros(0), zeros(0)  # until the first gradient
        self.mean, self.squares = zeros(rows, columns), zeros(rows, columns)

    def step(
        self, grad: torch.Tensor, t: int, betas: tuple[float, float], eps: float, frequency: int
    ) -> torch.Tensor:
        """Makes step t; the first, step 0, only computes the bases."""
        beta1, beta2 = betas
        update = torch.zeros_like(grad)
        if t:
            rotated = self.left_basis.T @ grad @ self.right_basis
            self.mean = self.mean.lerp(grad, 1 - beta1)
            self.squares = (beta2 * self.squares).addcmul(rotated, rotated, value=1 - beta2)
            mean = self.left_basis.T @ self.mean @ self.right_basis / (1 - beta1**t)
            root = torch.sqrt(self.squares / (1 - beta2**t)) + eps
            update = self.left_basis @ (mean / root) @ self.right_basis.T
        self.left = self.left.lerp(grad @ grad.T, 1 - beta2)
        self.right = self.right.lerp(grad.T @ grad, 1 - beta2)
        if not t:
            self.left_basis, self.right_basis = _first_basis(self.left), _first_basis(self.right)
        elif t % frequency == 0:
            rows, columns = _order(self.left, self.left_basis), _order(self.right, self.right_basis)
            self.left_basis = _next_basis(self.left, self.left_basis, rows)
            self.right_basis = _next_basis(self.right, self.right_basis, columns)
            self.squares = self.squares[rows, :][:, columns]
        return update


def _first_basis(square: torch.Tensor) -> torch.Tensor:
    vectors: torch.Tensor = torch.linalg.eigh(square.double()).eigenvectors
    return vectors.flip(1).to(square.dtype).contiguous()


def _order(square: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Returns the order of a basis' columns by their estimated eigenvalues, descending."""
    return torch.argsort((basis * (square @ basis)).sum(0), descending=True, stable=True)


def _next_basis(square: torch.Tensor, basis: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Computes a power iteration; sorts after it, as MKL's bits depend on a column's index."""
    vectors: torch.Tensor = torch.linalg.qr((square @ basis)[:, order]).Q
    return vectors.contiguous()


class ReferenceSoap:
    """SOAP of plain matrices, each with a table of blocks.

    Args:
        params: matrices.
        options: `SOAP`'s, of the same names.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 0.02,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        block_size: int = 1024,
    ) -> None:
        self._params, self._lr, self._decay = list(params), lr, weight_decay
        self._size, self._rest = block_size, (betas, eps, precondition_frequency)
        self._steps: dict[int, int] = {}
        self._blocks: dict[tuple[int, int, int], _PreconditionedBlock] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Updates the matrices that have gradients."""
        size = self._size
        for number, param in enumerate(self._params):
            if param.grad is None:
                continue
            t = self._steps.get(number, 0)
            self._steps[number] = t + 1
            param.mul_(1 - self._lr * self._decay)
            dtype = torch.promote_types(param.dtype, torch.float32)
            update = torch.empty_like(param)
            for i, rows in enumerate(param.grad.split(size)):
                for j, part in enumerate(rows.split(size, dim=1)):
                    # A copy: MKL's products depend on where in 16 bytes a matrix begins.
                    grad = part.to(dtype).clone(memory_format=torch.contiguous_format)
                    fresh = _PreconditionedBlock(part.shape[0], part.shape[1], dtype)
                    block = self._blocks.setdefault((number, i, j), fresh)
                    own = update[i * size : (i + 1) * size, j * size : (j + 1) * size]
                    own.copy_(block.step(grad, t, *self._rest))
            # Not in bfloat16: torch's add_ then rounds twice behind the last whole vector of a CPU.
            param.copy_(param.to(dtype).add(update, alpha=-self._lr))

    def zero_grad(self) -> None:
        """Clears all gradients."""
        for param in self._params:
            param.grad = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all blocks."""
        return sum(
            value.nbytes for block in self._blocks.values() for value in vars(block).values()
        )


class ReferenceSoapAndAdamW:
    """`ReferenceSoap` for the hidden matrices of a model, torch's AdamW for the rest.

    Args:
        model: a `matrix_net.MatrixNet`, or another whose matrices have such names.
        options: of `ReferenceSoap`.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        own = dict(matrices_of(model))
        rest = [param for name, param in model.named_parameters() if name not in own]
        decay = options.get("weight_decay", 0.01)
        self.soap = ReferenceSoap(own.values(), **options)
        self.adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=decay)

    def step(self) -> None:
        """Steps both."""
        self.soap.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        """Clears the gradients of both."""
        self.soap.zero_grad()
        self.adamw.zero_grad()
