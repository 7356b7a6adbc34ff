"""Tensors given out in other runs: what each rank holds, and how little travels."""

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


class Runs(Placement):
    """Each rank holds so many elements of the flat base, as ragged-shard's RaggedShard."""

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


class OtherRuns(Runs):
    """The same elements under another name."""


def whole(number, shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * number


def tensor(number, shape, mesh, placements):
    """What this rank holds under Runs on one axis, and anything that cuts rows on another."""
    base = whole(number, shape)
    run = next(one for one in placements if isinstance(one, Runs))
    axis = placements.index(run)
    for at, other in enumerate(placements):
        if isinstance(other, Shard):
            base = base.chunk(mesh.size(at), other.dim)[mesh.get_local_rank(at)].contiguous()
    held = run.interval(base.shape, mesh.get_local_rank(axis))
    meta = TensorMeta(torch.Size(shape), whole(0, shape).stride(), torch.float32)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(base.reshape(-1)[held.start : held.stop].clone(), spec, requires_grad=False)


def moved(sources, targets, shapes, mesh, place):
    """Whether each is what it would be if it had been made so, and the log."""
    given = [
        tensor(n, shape, mesh, place(one))
        for n, (shape, one) in enumerate(zip(shapes, sources, strict=True))
    ]
    with CommLog() as log:
        pending = redistribute_many(given, [place(one) for one in targets], async_op=True)
        results = pending.wait()
    for number, (result, target) in enumerate(zip(results, targets, strict=True)):
        wanted = tensor(number, shapes[number], mesh, place(target))
        assert torch.equal(result.to_local(), wanted.to_local())
        assert result.placements == wanted.placements
        assert result.shape == wanted.shape
    return log


CASES = [
    ("to owners", [(5, 7), (0, 12), (30, 0)], [(12, 0), (12, 0), (0, 30)]),
    ("back", [(12, 0), (0, 12), (30, 0)], [(6, 6), (5, 7), (1, 29)]),
    ("between", [(3, 9), (12, 0), (7, 23)], [(9, 3), (12, 0), (23, 7)]),
]


@pytest.mark.parametrize(("sources", "targets"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_two_ranks_send_what_changes_its_rank_in_one_exchange(sources, targets):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        ours, theirs = [Runs(*one) for one in sources], [Runs(*one) for one in targets]
        log = moved(ours, theirs, [(3, 4), (12,), (5, 6)], mesh, lambda one: [one])
        log.assert_counts({"all_to_all": 1})
        me = dist.get_rank()
        sent = sum(
            len(set(a.interval((), me)) - set(b.interval((), me)))
            for a, b in zip(ours, theirs, strict=True)
        )
        assert log.wire_bytes() == 4 * sent

    run_ranks(check, 2)


def test_nothing_is_sent_where_nothing_moves():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        same = [Runs(5, 7), Runs(0, 12)]
        again = [OtherRuns(*one.counts) for one in same]
        moved(same, again, [(3, 4), (12,)], mesh, lambda one: [one]).assert_counts({})

    run_ranks(check, 2)


@pytest.mark.parametrize("other", [Replicate(), Shard(0)], ids=str)
def test_beside_another_axis(other):
    def check():
        mesh = DeviceMesh(
            "cpu", [[3, 1], [0, 2]] if isinstance(other, Replicate) else [[0, 1], [2, 3]]
        )
        shapes = [(4, 6), (8, 3)]
        if isinstance(other, Shard):
            sources, targets = [Runs(5, 7), Runs(12, 0)], [Runs(0, 12), Runs(4, 8)]
        else:
            sources, targets = [Runs(5, 19), Runs(24, 0)], [Runs(0, 24), Runs(4, 20)]
        for place in (lambda one: [one, other], lambda one: [other, one]):
            moved(sources, targets, shapes, mesh, place).assert_counts({"all_to_all": 1})

    run_ranks(check, 4)
