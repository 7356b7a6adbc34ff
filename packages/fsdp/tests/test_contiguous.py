"""Which tensors follow each other in memory, in what order, and the tensor over them."""

import torch

from fsdp.collectives.contiguous import contiguous_runs, flat_view


def parts(*sizes, dtype=torch.float32):
    return list(torch.arange(sum(sizes), dtype=dtype).split(sizes))


def test_tensors_of_a_storage_are_in_the_order_of_memory():
    a, b, c = parts(3, 4, 5)
    assert contiguous_runs([[c, a, b]]) == [[1, 2, 0]]
    assert torch.equal(flat_view([a, b, c]), torch.arange(12.0))
    flat_view([a, b, c]).zero_()
    assert not c.any()


def test_storages_are_in_the_order_of_the_list():
    """Whatever their addresses are, so that sums over runs have the same bits in each process."""
    memory = [parts(2, 2) for _ in range(8)]
    for order in (range(8), range(7, -1, -1), (3, 5, 0, 7, 1, 2, 6, 4)):
        tensors = [memory[i][half] for half in (1, 0) for i in order]
        assert contiguous_runs([tensors]) == [[8 + n, n] for n in range(8)]


def test_what_ends_a_run():
    a, gap, b = parts(4, 1, 4)
    assert contiguous_runs([[a, b]]) == [[0], [1]]
    assert contiguous_runs([[a, gap, b]]) == [[0, 1, 2]]
    assert contiguous_runs([[a, gap, b]], nbytes=16) == [[0, 1], [2]]
    assert contiguous_runs([[a, gap, b]], labels=[0, 0, 1]) == [[0, 1], [2]]
    elsewhere = [a, gap.clone(), b]
    assert contiguous_runs([[a, gap, b], elsewhere]) == [[0], [1], [2]]
    rows = torch.zeros(4, 4)
    assert contiguous_runs([[rows[:2, :2], rows[1:]]]) == [[0], [1]]
    assert contiguous_runs([[a, gap.view(torch.int32), b]]) == [[0], [1], [2]]


def test_empty_tensors_and_empty_lists():
    a, empty, b = parts(3, 0, 2)
    assert contiguous_runs([[a, empty, b]]) == [[0, 1, 2]]
    assert contiguous_runs([[b, a, empty[:0], a[:0]]])[-1][-1] == 0
    assert contiguous_runs([[]]) == []
    single = torch.zeros(2, 3)
    assert flat_view([single]) is single
