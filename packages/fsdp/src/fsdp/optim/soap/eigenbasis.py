"""Adam in the eigenbasis of Shampoo's preconditioner: one block, on the rank that owns it.

Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (arXiv 2409.11321),
algorithms 3 and 4. From the authors' code (github.com/nikhilvyas/SOAP) it has what the paper leaves
open: the first gradient only gives the basis, and each new basis is sorted by its eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BlockState", "Hyperparameters", "step_block"]


@dataclass(frozen=True, eq=False)
class BlockState:
    """What is kept of a block of r rows and c columns; float32, or float64 where the parameter is.

    Attributes:
        left: running mean of G G^T, r x r.
        right: of G^T G, c x c.
        left_basis: eigenvectors of `left`, its columns, r x r.
        right_basis: of `right`, c x c.
        exp_avg: running mean of G, r x c.
        exp_avg_sq: running mean of the squares of the rotated G, r x c.
    """

    left: torch.Tensor
    right: torch.Tensor
    left_basis: torch.Tensor
    right_basis: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True)
class Hyperparameters:
    """Of one step.

    Attributes:
        beta1: of the mean.
        beta2: of the mean of squares, and of the preconditioners.
        eps: added to the root.
        updates: how many there were, this one included.
        renews: whether this step ends with a new basis.
    """

    beta1: float
    beta2: float
    eps: float
    updates: int
    renews: bool


def step_block(state: BlockState, grad: torch.Tensor, now: Hyperparameters) -> torch.Tensor | None:
    """What is to be subtracted from a block, times the learning rate; changes its state.

    The first gradient that is not zero gives the basis, and no update.

    Args:
        state: written to.
        grad: of the block, in the state's dtype.
        now: of this step.

    Returns:
        of the block's shape; None, and the state is as it was, if the gradient or a preconditioner
        is not finite, or a preconditioner not positive.
    """
    left = state.left.lerp(grad @ grad.T, 1 - now.beta2)
    right = state.right.lerp(grad.T @ grad, 1 - now.beta2)
    if not (_is_sound(left) and _is_sound(right)):
        return None
    if not _begun(state.left):
        update = torch.zeros_like(grad)
        if _begun(left):
            state.left_basis.copy_(_eigenvectors(left))
            state.right_basis.copy_(_eigenvectors(right))
    else:
        update = _adam(state, grad, now)
    state.left.copy_(left)
    state.right.copy_(right)
    if now.renews:
        _renew(state)
    return update


def _is_sound(preconditioner: torch.Tensor) -> bool:
    """Whether a sum of squares is one: an element not finite makes one of the diagonal so."""
    diagonal = preconditioner.diagonal()
    return bool((diagonal.isfinite() & (diagonal >= 0)).all())


def _begun(preconditioner: torch.Tensor) -> bool:
    return bool(preconditioner.diagonal().any())


def _adam(state: BlockState, grad: torch.Tensor, now: Hyperparameters) -> torch.Tensor:
    left, right = state.left_basis, state.right_basis
    rotated = left.T @ grad @ right
    state.exp_avg.lerp_(grad, 1 - now.beta1)
    state.exp_avg_sq.mul_(now.beta2).addcmul_(rotated, rotated, value=1 - now.beta2)
    mean = (left.T @ state.exp_avg @ right) / (1 - now.beta1**now.updates)
    root = (state.exp_avg_sq / (1 - now.beta2**now.updates)).sqrt_().add_(now.eps)
    return left @ (mean / root) @ right.T


def _renew(state: BlockState) -> None:
    """One step of orthogonal iteration, from the columns sorted by eigenvalue; squares follow."""
    rows = _renew_basis(state.left, state.left_basis)
    columns = _renew_basis(state.right, state.right_basis)
    state.exp_avg_sq.copy_(state.exp_avg_sq[rows][:, columns])


def _renew_basis(preconditioner: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Returns the order in which the columns were taken."""
    product = preconditioner @ basis
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    basis.copy_(torch.linalg.qr(product[:, order]).Q)
    return order


def _eigenvectors(preconditioner: torch.Tensor) -> torch.Tensor:
    """Largest eigenvalue first; in float64, as nothing but the first basis depends on it."""
    vectors: torch.Tensor = torch.linalg.eigh(preconditioner.double()).eigenvectors
    return vectors.flip(1)
