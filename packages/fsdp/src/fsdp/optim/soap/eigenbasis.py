"""Adam in the eigenbasis of Shampoo's preconditioner, for one block on the rank that owns it.

Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (arXiv 2409.11321),
algorithms 3 and 4. Two things that the paper does not specify follow the authors' code
(github.com/nikhilvyas/SOAP): the first gradient only initializes the basis, and each new basis is
sorted by its eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BlockState", "Hyperparameters", "step_block"]


@dataclass(frozen=True, eq=False)
class BlockState:
    """The state of a block of r rows and c columns: float32, or float64 if the parameter is.

    Attributes:
        left: running mean of G G^T, r x r.
        right: running mean of G^T G, c x c.
        left_basis: eigenvectors of `left` as columns, r x r.
        right_basis: eigenvectors of `right` as columns, c x c.
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
    """The hyperparameters of one step.

    Attributes:
        beta1: decay rate of the mean.
        beta2: decay rate of the mean of squares and of the preconditioners.
        eps: is added to the root of the mean of squares.
        updates: number of updates so far, including this one.
        renews_basis: whether this step ends with an update of the bases.
    """

    beta1: float
    beta2: float
    eps: float
    updates: int
    renews_basis: bool


def step_block(
    state: BlockState, grad: torch.Tensor, options: Hyperparameters
) -> torch.Tensor | None:
    """Computes the update of a block, which is subtracted times the learning rate.

    The first gradient that is not zero initializes the bases, and its update is zero.

    Args:
        state: state of the block; it is updated.
        grad: gradient of the block, in the dtype of the state.
        options: hyperparameters of this step.

    Returns:
        The update, of the block's shape; or None if the gradient or a preconditioner is not finite,
        or a preconditioner is not positive, in which case the state is unchanged.
    """
    left = state.left.lerp(grad @ grad.T, 1 - options.beta2)
    right = state.right.lerp(grad.T @ grad, 1 - options.beta2)
    if not (_is_valid(left) and _is_valid(right)):
        return None
    if not _is_initialized(state.left):
        update = torch.zeros_like(grad)
        if _is_initialized(left):
            state.left_basis.copy_(_eigenvectors(left))
            state.right_basis.copy_(_eigenvectors(right))
    else:
        update = _adam(state, grad, options)
    state.left.copy_(left)
    state.right.copy_(right)
    if options.renews_basis:
        _update_bases(state)
    return update


def _is_valid(preconditioner: torch.Tensor) -> bool:
    """Checks the diagonal: an element of the gradient that is not finite makes one of it so."""
    diagonal = preconditioner.diagonal()
    return bool((diagonal.isfinite() & (diagonal >= 0)).all())


def _is_initialized(preconditioner: torch.Tensor) -> bool:
    return bool(preconditioner.diagonal().any())


def _adam(state: BlockState, grad: torch.Tensor, options: Hyperparameters) -> torch.Tensor:
    left, right = state.left_basis, state.right_basis
    rotated = left.T @ grad @ right
    state.exp_avg.lerp_(grad, 1 - options.beta1)
    state.exp_avg_sq.mul_(options.beta2).addcmul_(rotated, rotated, value=1 - options.beta2)
    mean = (left.T @ state.exp_avg @ right) / (1 - options.beta1**options.updates)
    root = (state.exp_avg_sq / (1 - options.beta2**options.updates)).sqrt_().add_(options.eps)
    return left @ (mean / root) @ right.T


def _update_bases(state: BlockState) -> None:
    """Does one step of orthogonal iteration on the sorted columns, and sorts `exp_avg_sq` alike."""
    rows = _update_basis(state.left, state.left_basis)
    columns = _update_basis(state.right, state.right_basis)
    state.exp_avg_sq.copy_(state.exp_avg_sq[rows][:, columns])


def _update_basis(preconditioner: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Updates a basis in place; returns the order into which its columns were sorted."""
    product = preconditioner @ basis
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    basis.copy_(torch.linalg.qr(product[:, order]).Q)
    return order


def _eigenvectors(preconditioner: torch.Tensor) -> torch.Tensor:
    """Returns the eigenvectors by descending eigenvalue; float64 is for the first basis only."""
    vectors: torch.Tensor = torch.linalg.eigh(preconditioner.double()).eigenvectors
    return vectors.flip(1)
