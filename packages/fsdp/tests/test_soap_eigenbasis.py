"""The update of one block: zero gradients, and values that are not finite."""

import copy
from dataclasses import replace

import pytest
import torch

from fsdp.optim.soap.eigenbasis import BlockState, Hyperparameters, step_block

OPTIONS = Hyperparameters(beta1=0.9, beta2=0.9, eps=1e-8, updates=1, renews_basis=True)


def new_block(rows, columns):
    def zeros(*shape):
        return torch.zeros(*shape)

    left, right = torch.eye(rows), torch.eye(columns)
    return BlockState(
        zeros(rows, rows), zeros(columns, columns), left, right,
        zeros(rows, columns), zeros(rows, columns),
    )  # fmt: skip


def test_zero_gradients_change_nothing_before_the_first_nonzero_one():
    block, early = new_block(3, 2), replace(OPTIONS, renews_basis=False)
    before = copy.deepcopy(block)
    assert torch.equal(step_block(block, torch.zeros(3, 2), early), torch.zeros(3, 2))
    for name, value in vars(before).items():
        assert torch.equal(getattr(block, name), value)
    grad = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    assert not step_block(block, grad, OPTIONS).any()
    assert torch.equal(block.left_basis.abs()[:, 0], torch.tensor([0.0, 0.0, 1.0]))  # the largest
    assert step_block(block, grad, OPTIONS).any()
    assert step_block(block, torch.zeros(3, 2), OPTIONS).isfinite().all()


@pytest.mark.parametrize("fault", ["nan", "infinite", "too large", "negative", "lost state"])
def test_block_that_is_not_finite_or_positive_keeps_its_state(fault):
    block = new_block(4, 3)
    torch.manual_seed(0)
    for _ in range(3):
        assert step_block(block, torch.randn(4, 3), OPTIONS) is not None
    grad = torch.randn(4, 3)
    if fault in ("nan", "infinite", "too large"):
        grad[2, 1] = {"nan": torch.nan, "infinite": torch.inf, "too large": 1e30}[fault]
    elif fault == "negative":
        block.right[1, 1] = -100.0
    else:
        block.left[1, 1] = torch.nan
    before = copy.deepcopy(block)
    assert step_block(block, grad, OPTIONS) is None
    for name, value in vars(before).items():
        assert getattr(block, name).equal(value) or value.isnan().any()
