"""Whether a local tensor matches its region."""

import pytest
import torch

from dist_rng.regions.draw_strides import require_fit
from dist_rng.regions.region import IndexRange, Region

BOX = Region.box((9, 14), (2, 3), (5, 7))
WINDOWS = Region.flat((9, 14), 11, 100)
NOTHING = Region.box((9, 14), (9, 0), (0, 14))


def fit(region, tensor):
    require_fit(region, tuple(tensor.shape), tensor.stride())


@pytest.mark.parametrize(
    ("region", "tensor"),
    [
        (BOX, torch.empty(5, 7)),
        (BOX, torch.empty(7, 5).t()),
        (BOX, torch.empty(10, 14)[::2, ::2]),
        (WINDOWS, torch.empty(89)),
        (WINDOWS, torch.empty(89, 1)),
        (Region.full((4, 6)).within(IndexRange(0, 12)), torch.empty(3, 4)),
        (NOTHING, torch.empty(0, 14)),
        (NOTHING, torch.empty(0)),
        (Region.full((1, 3)), torch.empty(3).expand(1, 3)),
    ],
)
def test_a_matching_local_tensor_is_accepted(region, tensor):
    fit(region, tensor)


@pytest.mark.parametrize(
    ("region", "tensor", "message"),
    [
        (
            BOX,
            torch.empty(3, 3),
            r"expected .* shape \(5, 7\), got \(3",
        ),
        (BOX, torch.empty(7, 5), r"got \(7, 5\)"),
        (BOX, torch.empty(0, 7), r"got \(0, 7\)"),
        (NOTHING, torch.empty(1, 14), r"got \(1, 14\)"),
        (BOX, torch.empty(7).expand(5, 7), r"strides \(0, 1\); clone it first"),
        (WINDOWS, torch.empty(88), "89 elements in windows: expected a contiguous local tensor"),
        (WINDOWS, torch.empty(178)[::2], r"got shape \(89,\) and strides \(2,\)"),
    ],
)
def test_a_mismatch_raises(region, tensor, message):
    with pytest.raises(ValueError, match=message):
        fit(region, tensor)
