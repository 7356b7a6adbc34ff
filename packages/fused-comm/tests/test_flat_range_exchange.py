"""Redistribution between placements of flat ranges: values, and only moved elements are sent."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fused_comm import redistribute_many
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks


class FlatRanges(Placement):
    """Each rank has so many elements of the flat base, as in ragged-shard's RaggedShard."""

    def __init__(self, *counts):
        super().__init__()
        self.counts = counts

    def interval(self, base_shape, rank):
        return range(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))

    def local_shape(self, base_shape, rank):
        return (self.counts[rank],)

    def __eq__(self, other):
        return type(self) is type(other) and self.counts == other.counts

    def __hash__(self):
        return hash(self.counts)


class OtherFlatRanges(FlatRanges):
    """The same elements under another name."""


def whole(number, shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * number


def tensor(number, shape, mesh, placements):
    """The DTensor of this rank with FlatRanges on one axis and another placement on the other."""
    base = whole(number, shape)
    ranges = next(one for one in placements if isinstance(one, FlatRanges))
    axis = placements.index(ranges)
    for at, other in enumerate(placements):
        if isinstance(other, Shard):
            base = base.chunk(mesh.size(at), other.dim)[mesh.get_local_rank(at)].contiguous()
    own = ranges.interval(base.shape, mesh.get_local_rank(axis))
    meta = TensorMeta(torch.Size(shape), whole(0, shape).stride(), torch.float32)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(base.reshape(-1)[own.start : own.stop].clone(), spec, requires_grad=False)


def check_moved(sources, targets, shapes, mesh, place):
    """Redistributes tensors and compares each with one made with its target; returns the log."""
    tensors = [
        tensor(n, shape, mesh, place(one))
        for n, (shape, one) in enumerate(zip(shapes, sources, strict=True))
    ]
    with CommLog() as log:
        pending = redistribute_many(tensors, [place(one) for one in targets], async_op=True)
        results = pending.wait()
    for number, (result, target) in enumerate(zip(results, targets, strict=True)):
        expected = tensor(number, shapes[number], mesh, place(target))
        assert torch.equal(result.to_local(), expected.to_local())
        assert result.placements == expected.placements
        assert result.shape == expected.shape
    return log


CASES = [
    ("to owners", [(5, 7), (0, 12), (30, 0)], [(12, 0), (12, 0), (0, 30)]),
    ("back", [(12, 0), (0, 12), (30, 0)], [(6, 6), (5, 7), (1, 29)]),
    ("between", [(3, 9), (12, 0), (7, 23)], [(9, 3), (12, 0), (23, 7)]),
]


@pytest.mark.parametrize(("sources", "targets"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_two_ranks_send_only_elements_that_move_in_one_all_to_all(sources, targets):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        before, after = ([FlatRanges(*one) for one in ranges] for ranges in (sources, targets))
        log = check_moved(before, after, [(3, 4), (12,), (5, 6)], mesh, lambda one: [one])
        log.assert_counts({"all_to_all": 1})
        me = dist.get_rank()
        sent = sum(
            len(set(a.interval((), me)) - set(b.interval((), me)))
            for a, b in zip(before, after, strict=True)
        )
        assert log.wire_bytes() == 4 * sent

    run_ranks(check, 2)


def test_nothing_is_sent_where_no_element_moves():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        same = [FlatRanges(5, 7), FlatRanges(0, 12)]
        again = [OtherFlatRanges(*one.counts) for one in same]
        check_moved(same, again, [(3, 4), (12,)], mesh, lambda one: [one]).assert_counts({})

    run_ranks(check, 2)


@pytest.mark.parametrize("other", [Replicate(), Shard(0)], ids=str)
def test_beside_another_axis(other):
    def check():
        mesh = DeviceMesh(
            "cpu", [[3, 1], [0, 2]] if isinstance(other, Replicate) else [[0, 1], [2, 3]]
        )
        shapes = [(4, 6), (8, 3)]
        if isinstance(other, Shard):
            sources, targets = (
                [FlatRanges(5, 7), FlatRanges(12, 0)],
                [FlatRanges(0, 12), FlatRanges(4, 8)],
            )
        else:
            sources, targets = (
                [FlatRanges(5, 19), FlatRanges(24, 0)],
                [FlatRanges(0, 24), FlatRanges(4, 20)],
            )
        for place in (lambda one: [one, other], lambda one: [other, one]):
            check_moved(sources, targets, shapes, mesh, place).assert_counts({"all_to_all": 1})

    run_ranks(check, 4)
