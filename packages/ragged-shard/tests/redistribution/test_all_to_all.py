"""The plan of an all-to-all, and the whole of it played in one process."""

import itertools
import math

import pytest
import torch
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.tensor import Shard

from ragged_shard import InterleavedShard, RaggedShard
from ragged_shard.geometry.stored_boxes import StorageWindow
from ragged_shard.redistribution.all_to_all import all_to_all, pack, plan_all_to_all, unpack
from testkit import CommLog, fake_mesh

SIZE = 3
BASES = [(12, 8), (12, 2, 4), (13, 5), (12,), (0, 4), (2, 3)]


def placements(base):
    """Those of the table that fit a base."""
    rows, elements = base[0], math.prod(base)
    found = [Shard(dim) for dim in range(len(base))]
    found += [RaggedShard.owned_by(owner, SIZE) for owner in (0, 2)]
    found += [
        RaggedShard((0,), units)
        for units in [
            (1, 0, 0),
            (0, rows, 0),
            (rows // 2, 0, rows - rows // 2),
            (1, 3, 8),
            (4, 4, 4),
        ]
        if sum(units) and rows % sum(units) == 0
    ]
    every = tuple(range(len(base)))
    found += [
        RaggedShard(every, units)
        for units in [(1, elements - 2, 1), (0, 1, elements - 1), (5, 7, elements - 12)]
        if sum(units) > 0 and min(units) >= 0 and elements % sum(units) == 0
    ]
    found += [
        InterleavedShard(dim, chunks)
        for dim in range(len(base))
        for chunks in (2, 3)
        if base[dim] % chunks == 0
    ]
    return list(dict.fromkeys(found))


def local(numbers, placement, rank):
    """A rank's local tensor, by way of torch's own operators."""
    if isinstance(placement, RaggedShard):
        unit = numbers.numel() // sum(placement.local_units)
        part = numbers.flatten().split([unit * count for count in placement.local_units])[rank]
        return part.reshape(placement.local_shape(numbers.shape, rank))
    if isinstance(placement, InterleavedShard):
        chunks = numbers.chunk(placement.interleaves, placement.dim)
        return torch.cat([cut(chunk, placement.dim, rank) for chunk in chunks], placement.dim)
    return cut(numbers, placement.dim, rank).contiguous()


def cut(tensor, dim, rank):
    parts = tensor.chunk(SIZE, dim)
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


PAIRS = [
    pytest.param(base, source, target, id=f"{'x'.join(map(str, base))}-{source}-to-{target}")
    for base in BASES
    for source, target in itertools.product(placements(base), repeat=2)
]


@pytest.mark.parametrize(("base", "source", "target"), PAIRS)
def test_every_element_reaches_who_wants_it_and_nothing_else_travels(base, source, target):
    numbers = torch.arange(math.prod(base)).reshape(base)
    plans = [plan_all_to_all(source, target, base, SIZE, rank) for rank in range(SIZE)]
    locals_ = [local(numbers, source, rank).contiguous() for rank in range(SIZE)]
    buffers = [pack(locals_[rank], plans[rank].sent) for rank in range(SIZE)]
    parcels = [buffers[rank].split(list(plans[rank].sent_to)) for rank in range(SIZE)]
    for sender, receiver in itertools.product(range(SIZE), repeat=2):
        assert plans[sender].sent_to[receiver] == plans[receiver].received_from[sender]
        common = set(locals_[sender].flatten().tolist()) & set(
            local(numbers, target, receiver).flatten().tolist()
        )
        assert set(parcels[sender][receiver].tolist()) == common
        assert len(parcels[sender][receiver]) == len(common)
    for rank in range(SIZE):
        received = torch.cat([parcels[sender][rank] for sender in range(SIZE)])
        expected = local(numbers, target, rank)
        assert plans[rank].shape == tuple(expected.shape)
        assert torch.equal(unpack(received, plans[rank].received, plans[rank].shape), expected)


def test_reading_a_whole_tensor_in_order_is_a_view():
    tensor = torch.arange(12).reshape(4, 3)
    whole = (StorageWindow((2, 3), (3, 1), 0), StorageWindow((6,), (1,), 6))
    assert pack(tensor, whole).data_ptr() == tensor.data_ptr()
    swapped = pack(tensor, whole[::-1])
    assert swapped.data_ptr() != tensor.data_ptr()
    assert swapped.tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert pack(tensor, ()).shape == (0,)


def test_reading_a_part_does_not_give_the_rest_away():
    tensor = torch.arange(12).reshape(4, 3)
    assert pack(tensor, (StorageWindow((2, 3), (3, 1), 0),)).tolist() == [0, 1, 2, 3, 4, 5]


def test_reading_minds_where_a_tensor_begins_in_its_storage():
    tensor = torch.arange(20)[8:].view(4, 3)
    assert pack(tensor, (StorageWindow((4, 1), (3, 1), 1),)).tolist() == [9, 12, 15, 18]


def test_writing_in_order_is_a_view_of_the_buffer():
    buffer = torch.arange(6)
    result = unpack(buffer, (StorageWindow((6,), (1,), 0),), (2, 3))
    assert result.data_ptr() == buffer.data_ptr()
    assert result.tolist() == [[0, 1, 2], [3, 4, 5]]
    columns = (StorageWindow((2, 1), (3, 1), 0), StorageWindow((2, 2), (3, 1), 1))
    assert unpack(buffer, columns, (2, 3)).tolist() == [[0, 2, 3], [1, 4, 5]]


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        (RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (1, 3)), (3,)),
        (RaggedShard((0, 1), (3, 9)), RaggedShard((0,), (1, 3)), (1, 3)),
    ],
    ids=["rows-to-elements", "elements-to-rows"],
)
def test_other_words_for_the_same_units_send_nothing_and_copy_nothing(source, target, shape):
    local_tensor = torch.arange(3).view(source.local_shape((4, 3), 0))
    with fake_mesh((2,)) as mesh, CommLog() as log:
        result = all_to_all(local_tensor, source, target, (4, 3), mesh, 0)
    assert result.shape == shape
    assert result.data_ptr() == local_tensor.data_ptr()
    assert not log.calls


def test_other_units_are_one_all_to_all_of_what_is_held():
    source, target = RaggedShard((0,), (1, 3)), RaggedShard((0,), (2, 2))
    with fake_mesh((2,)) as mesh, CommLog() as log:
        result = all_to_all(torch.zeros(1, 3), source, target, (4, 3), mesh, 0)
        assert wait_tensor(result).shape == (2, 3)
    assert len(log.calls) == 1
