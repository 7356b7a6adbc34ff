"""The blocks and strips of matrices, and their cost."""

import torch

from fsdp.optim.matrix.matrices import matrices_of
from fsdp.optim.soap.blocks import block_ranges, blocks_of, soap_cost, split_into_strips


def test_strips_have_at_most_block_size_rows():
    assert block_ranges(10, 4) == [range(4), range(4, 8), range(8, 10)]
    assert block_ranges(4, 4) == [range(4)]
    matrices = matrices_of(torch.zeros(3, 5, 2), (5,), "w", "SOAP")
    strips = split_into_strips(matrices, 3)
    assert [strip.name for strip in strips[:3]] == ["w[0][0:3]", "w[0][3:5]", "w[1][0:3]"]
    assert [strip.shape for strip in strips] == [(3, 2), (2, 2)] * 3
    assert [strip.local_slice for strip in strips] == [
        slice(start, stop)
        for first in (0, 10, 20)
        for start, stop in ((first, first + 6), (first + 6, first + 10))
    ]


def test_cost_is_that_of_the_blocks():
    """A matrix of 4 x 6 has blocks of 4 x 4 and 4 x 2; bases are updated every second step."""
    products = 4 * 4 * 4 * (4 + 4) + 4 * 4 * 2 * (4 + 2)
    assert soap_cost(4, 2)((4, 6)) == products + 7 * 128 // 6 + 7 * (64 + 8) // 6
    assert soap_cost(4, 1)((4, 6)) > soap_cost(4, 10)((4, 6))
    assert soap_cost(4, 2)((8, 6)) == 2 * soap_cost(4, 2)((4, 6))


def test_blocks_are_those_of_the_first_rows_first():
    found = [(one.rows, one.columns) for one in blocks_of((5, 6), 3)]
    rows, columns = (range(3), range(3, 5)), (range(3), range(3, 6))
    assert found == [(one, other) for one in rows for other in columns]
    strip = torch.arange(30).view(5, 6)
    assert blocks_of((5, 6), 3)[2].part_of(strip).tolist() == [[18, 19, 20], [24, 25, 26]]
