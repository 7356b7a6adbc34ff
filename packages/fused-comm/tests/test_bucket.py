"""Bucket plans: the slots of gradients in buffers, packing, and the views of results."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fused_comm.bucket import BucketItem, Route, plan_buckets
from fused_comm.in_flight_bucket import any_rank_has, pack, shard_view
from fused_comm.process_groups import flat_group
from fused_comm.reduction import reduction_of
from testkit import fake_mesh

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def items(mesh, shapes, source, target, dtype=torch.float32):
    """One item for each shape, all of one route."""
    found = []
    for index, shape in enumerate(shapes):
        param, grad = (
            DTensor.from_local(torch.zeros(_local(mesh, shape, placed)), mesh, placed,
                               run_check=False, shape=torch.Size(shape),
                               stride=torch.empty(shape, device="meta").stride())
            for placed in (target, source)
        )  # fmt: skip
        reduction = reduction_of(f"p{index}", param, grad)
        scattered = tuple(one.axis for one in reduction.scattered)
        route = Route(
            (flat_group(mesh, scattered),) if scattered else (),
            (flat_group(mesh, reduction.reduced),) if reduction.reduced else (),
            dtype, torch.device("cpu"), averaged=False,
        )  # fmt: skip
        found.append(BucketItem(index, reduction, route))
    return found


def _local(mesh, shape, placements):
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces = torch.empty(sizes, device="meta").chunk(mesh.size(axis), placement.dim)
            rank = mesh.get_local_rank(axis)
            sizes = list(pieces[rank].shape) if rank < len(pieces) else [
                0 if dim == placement.dim else size for dim, size in enumerate(sizes)
            ]  # fmt: skip
    return sizes


def test_buckets_fill_in_the_order_of_use_up_to_their_size():
    with fake_mesh((2,)) as mesh:
        planned = items(mesh, [(10,), (10,), (30,), (10,), (5,)], [P], [R])
        buckets = plan_buckets(planned, 80)
        assert [[slot.item.index for slot in bucket.slots] for bucket in buckets] == [
            [0, 1], [2], [3, 4],
        ]  # fmt: skip


def test_each_route_has_buckets_of_its_own_in_order():
    with fake_mesh((2, 2)) as mesh:
        both = items(mesh, [(8,), (8,)], [P, P], [R, R])
        first = items(mesh, [(8,), (8,)], [P, R], [R, R])
        buckets = plan_buckets([both[0], first[0], both[1], first[1]], 1000)
        assert [bucket.route.reduced[0].size for bucket in buckets] == [4, 2]


def test_slots_are_aligned_and_apart():
    with fake_mesh((2,)) as mesh:
        (bucket,) = plan_buckets(items(mesh, [(3,), (1, 7), (2, 2)], [P], [R]), 1000)
        ends = [slot.start + slot.size for slot in bucket.slots]
        assert [slot.start for slot in bucket.slots] == [0, 4, 12]
        assert all(end <= start.start for end, start in zip(ends, bucket.slots[1:], strict=False))
        assert [slot.flag for slot in bucket.slots] == [16, 17, 18]
        assert bucket.row == 20


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (1, 3), (3,), (2, 5)])
def test_rows_hold_the_shards_of_all_ranks(rank, shape):
    """Padding is in the buffer only: each shard is copied from the gradient directly to its row."""
    with fake_mesh((4,), rank=rank) as mesh:
        (bucket,) = plan_buckets(items(mesh, [shape, shape], [P], [S0]), 1000)
        whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        buffer = torch.full((bucket.numel,), math.nan)
        pack(bucket, {0: whole, 1: 2 * whole}, buffer)
        pieces = whole.chunk(4)
        for row, piece in zip(
            buffer.view(4, bucket.row), [*pieces, *[whole[:0]] * 4], strict=False
        ):
            for slot, factor in zip(bucket.slots, (1, 2), strict=True):
                values = row[slot.start : slot.start + piece.numel()].view(piece.shape)
                assert torch.equal(values, factor * piece)
        own = buffer.view(4, bucket.row)[rank]
        expected = pieces[rank] if rank < len(pieces) else whole[:0]
        assert torch.equal(shard_view(bucket.slots[0], own), expected)


@pytest.mark.parametrize("rank", range(8))
def test_two_scattered_axes_shard_one_after_the_other(rank):
    with fake_mesh((2, 4), rank=rank) as mesh:
        planned = items(mesh, [(7, 6)], [P, P], [S0, S1])
        (bucket,) = plan_buckets(planned, 1000)
        whole = torch.arange(42.0).view(7, 6)
        buffer = torch.empty(bucket.numel)
        pack(bucket, {0: whole}, buffer)
        row = buffer.view(8, bucket.row)[rank]
        by_row = whole.chunk(2, 0)[rank // 4].chunk(4, 1)
        expected = by_row[rank % 4] if rank % 4 < len(by_row) else whole[:0, :0]
        assert shard_view(bucket.slots[0], row).flatten().tolist() == expected.flatten().tolist()


def test_slots_of_missing_gradients_are_zero_and_not_flagged():
    with fake_mesh((2,)) as mesh:
        (bucket,) = plan_buckets(items(mesh, [(3,), (2,)], [P], [R]), 1000)
        buffer = torch.full((bucket.numel,), 7.0)
        pack(bucket, {1: torch.ones(2)}, buffer)
        assert shard_view(bucket.slots[0], buffer).tolist() == [0.0] * 3
        assert [any_rank_has(slot, buffer) for slot in bucket.slots] == [False, True]


def test_packing_casts_and_takes_any_strides():
    with fake_mesh((2,)) as mesh:
        (bucket,) = plan_buckets(items(mesh, [(3, 2)], [P], [R], dtype=torch.float64), 1000)
        buffer = torch.empty(bucket.numel, dtype=torch.float64)
        grad = torch.arange(6.0).view(2, 3).t()
        pack(bucket, {0: grad}, buffer)
        assert torch.equal(shard_view(bucket.slots[0], buffer), grad.double())


def test_empty_shards_are_not_taken_for_views_of_the_buffer():
    """Three slots and three empty shards, none of which is a view of the buffer."""
    with fake_mesh((2,)) as mesh:
        shapes = [(1, 4), (1, 4), (1, 4)]
        (bucket,) = plan_buckets(items(mesh, shapes, [P], [S0]), 1000)
        buffer = torch.zeros(bucket.numel)
        pack(bucket, {number: torch.full((1, 4), 8.0) for number in range(3)}, buffer, 2.0)
        row = buffer.view(2, bucket.row)[0]
        assert [shard_view(slot, row).tolist() for slot in bucket.slots] == [[[4.0] * 4]] * 3
