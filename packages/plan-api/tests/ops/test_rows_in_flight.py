"""What is computed from a sum whose rows are in flight is what is computed from the whole sum."""

import pytest
import torch
from torch import nn

from plan_api.ops.overlap.rows_in_flight import ArrivingRows, RowsInFlight, block_lengths, rows_of

FEATURES = 6


class Sum:
    """A sum of two blocks of rows, and the numbers of those that have arrived."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(0)
        self.value = torch.randn(3, 4, FEATURES, dtype=dtype)
        self.arrived = []
        tensor = torch.full_like(self.value, torch.nan)
        lengths = block_lengths(tensor, 2)
        sent = rows_of(self.value).split(lengths)

        def fill(number):
            rows_of(tensor).split(lengths)[number].copy_(sent[number])
            self.arrived.append(number)

        self.rows = RowsInFlight(ArrivingRows([tensor], lengths, fill))


def rms_norm(tensor):
    variance = tensor.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return torch.arange(1.0, 1.0 + FEATURES) * (tensor * torch.rsqrt(variance + 1e-6)).to(
        tensor.dtype
    )


BY_ROWS = {
    "residual": lambda rows: torch.ones(3, 4, FEATURES) + rows,
    "rms norm by hand": rms_norm,
    "nn.RMSNorm, in place inside": nn.RMSNorm(FEATURES),
    "nn.LayerNorm": nn.LayerNorm(FEATURES),
    "double": lambda rows: rows.double() * 2,
    "same shape": lambda rows: rows.view(3, 4, FEATURES).detach() + 1,
}
WHOLE = {
    "sum": lambda rows: rows.sum(0),
    "norm of two dims": nn.LayerNorm((4, FEATURES)),
    "another mean": lambda rows: rows.mean(1, keepdim=True),
    "part": lambda rows: rows[:, 1:] * 2,
    "dropout": lambda rows: nn.functional.dropout(rows, 0.5),
    "rows of others": lambda rows: rows + torch.arange(4.0)[:, None],
    "transposed": lambda rows: rows + torch.randn(4, 3, FEATURES).transpose(0, 1),
}


@pytest.mark.parametrize("name", [*BY_ROWS, *WHOLE])
def test_operators_compute_what_they_compute_of_the_whole(name):
    function, found = (BY_ROWS | WHOLE)[name], Sum()
    torch.manual_seed(1)
    expected = function(found.value)
    torch.manual_seed(1)
    actual = function(found.rows)
    assert found.arrived == ([] if name in BY_ROWS else [0, 1])
    assert torch.equal(actual, expected)
    assert found.arrived == [0, 1]


@pytest.mark.parametrize("name", ["residual", "rms norm by hand", "nn.LayerNorm", "part"])
def test_gradients_are_those_of_the_whole(name):
    def gradients(tensor):
        tensor = tensor.requires_grad_()
        module = (BY_ROWS | WHOLE)[name]
        scale = torch.ones(FEATURES, requires_grad=True)
        module(tensor * scale).square().sum().backward()
        return [tensor.grad, scale.grad]

    found = Sum()
    expected = gradients(found.value.clone())
    for one, other in zip(gradients(found.rows), expected, strict=True):
        assert torch.equal(one, other)


def test_blocks_are_computed_one_after_another():
    found = Sum()
    arrived = [list(found.arrived) for _ in rms_norm(1 + found.rows).in_blocks()]
    assert arrived == [[0], [0, 1]]


def test_a_change_in_place_is_seen_by_later_operators_only():
    found = Sum()
    before = found.rows * 2
    changed = found.rows
    changed += 1
    assert isinstance(changed, RowsInFlight)
    assert torch.equal(before, found.value * 2)
    assert torch.equal(changed * 2, (found.value + 1) * 2)
    found = Sum()
    before = found.rows * 2
    alias = found.rows.detach()
    found.rows.add_(1.0)
    assert torch.equal(before, found.value * 2)
    assert torch.equal(alias, found.value + 1)
    found = Sum()
    before = found.rows * 2
    found.rows[:, 0] = 0.0
    assert torch.equal(before, found.value * 2)
    assert found.rows[:, 0].abs().sum() == 0.0


def test_a_weight_may_change_before_the_rows_have_arrived():
    found, weight = Sum(), torch.ones(FEATURES)
    product = found.rows * weight
    weight.zero_()
    assert torch.equal(product, found.value)


def test_a_residual_that_changes_before_the_rows_have_arrived_is_refused():
    found, residual = Sum(), torch.ones(3, 4, FEATURES)
    total = found.rows + residual
    residual.zero_()
    with pytest.raises(RuntimeError, match=r"shape \[3, 4, 6\] was changed in place"):
        total.sum()


def test_no_rows_are_one_block():
    assert block_lengths(torch.empty(0, 4), 2) == [0]
    assert block_lengths(torch.empty(3, 4), 2) == [2, 1]
