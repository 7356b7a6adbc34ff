"""Regions of DTensors equal the shards of distribute_tensor, rank by rank."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dist_rng.dtensor.patches import patched_operators
from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import IndexRange, Region, memory_order
from dist_rng.regions.registry import register_placement
from testkit import each_rank, fake_mesh

SHAPES = [(7,), (5, 4), (6, 3, 2), (1, 9), (0, 3), (13, 2)]


class Custom(Placement):
    """A placement with what any placement must define to be used in a DTensor."""

    def __init__(self):
        super().__init__()

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return hash(type(self))


def placements_of(shape):
    return [Replicate(), _StridedShard(0, split_factor=2), *map(Shard, range(len(shape)))]


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (8,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_every_rank_holds_its_part_of_distribute_tensor(mesh_shape):
    for _, mesh in each_rank(mesh_shape):
        for shape in SHAPES:
            full = torch.arange(torch.Size(shape).numel()).view(shape)
            for placements in itertools.product(placements_of(shape), repeat=len(mesh_shape)):
                dtensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
                expected = slice_of(full, Region.of(dtensor))
                assert torch.equal(dtensor._local_tensor, expected), (shape, placements)


def test_five_axes():
    shape, placements = (6, 5, 4, 3, 8), [Shard(4), Shard(0), Shard(4), Replicate(), Shard(2)]
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    for _, mesh in each_rank((2, 2, 2, 1, 2)):
        dtensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        assert torch.equal(dtensor._local_tensor, slice_of(full, Region.of(dtensor)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 1), (0, 2, 3)]
)
def test_the_memory_order_of_a_dense_tensor_is_found(shape, order):
    dense = torch.empty([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(3)]
    )
    found = memory_order(shape, dense.stride())
    relevant = [dim for dim in order if shape[dim] != 1] if 0 not in shape else []
    assert [dim for dim in found if dim in relevant] == relevant


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 1, 4), (3, 4, 1), (1, 3, 1), (1, 1)], ids=str)
def test_dims_of_size_one_keep_their_order_for_any_stride(shape):
    """Windows, which placements of other packages use, need the dims in their logical order."""
    dims = tuple(range(len(shape)))
    contiguous = torch.empty(shape).stride()
    assert memory_order(shape, contiguous) == dims
    for odd in (0, 1, 1000):
        stride = [odd if size == 1 else one for size, one in zip(shape, contiguous, strict=True)]
        assert memory_order(shape, tuple(stride)) == dims


def test_axes_shard_one_dim_in_the_order_of_the_spec():
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    full = torch.arange(84).view(12, 7)
    for _, mesh in each_rank((2, 2, 3)):
        dtensor = distribute_tensor(full, mesh, [Shard(0)] * 3, src_data_rank=None)
        x, y, z = mesh.get_coordinate()
        dtensor._spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 2, 0)),)
        expected = full.chunk(2)[y].chunk(3)[z].chunk(2)[x]
        assert torch.equal(slice_of(full, Region.of(dtensor)), expected)


def test_a_registered_placement_receives_the_region_of_the_axes_before():
    class Fixed(Custom):
        """Rows 1 and 2 of the region it receives."""

    register_placement(Fixed, lambda region, *_: region.select(0, IndexRange(1, 3)))
    full = torch.arange(40).view(10, 4)
    for _, mesh in each_rank((1, 2)):
        dtensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        _, rank = mesh.get_coordinate()
        dtensor._spec.placements = (Fixed(), Shard(0))
        assert torch.equal(slice_of(full, Region.of(dtensor)), full[1 + rank : 2 + rank])
        dtensor._spec.placements = (Shard(0), Fixed())
        assert torch.equal(slice_of(full, Region.of(dtensor)), full[1:3])


@pytest.mark.parametrize("stride", [(8, 2), (4, 0), (1, 1)])
def test_a_tensor_that_is_not_dense_raises(stride):
    with pytest.raises(ValueError, match="expected a dense global tensor"):
        memory_order((2, 4), stride)


def test_partial_and_unknown_placements_raise_with_the_remedy():
    class Strange(Custom):
        pass

    with fake_mesh((2,)) as mesh:
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(ValueError, match="redistribute it to Replicate or Shard first"):
            Region.of(partial)
        strange = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        strange._spec.placements = (Strange(),)
        with pytest.raises(ValueError, match=r"call dist_rng.register_placement\(.*Strange"):
            Region.of(strange)


def test_a_placement_registered_as_last_is_applied_last():
    class Half(Custom):
        """The first or the second half of the flat local tensor."""

    def halves(region, placement, size, rank):
        del placement
        step = region.numel // size
        return region.within(IndexRange(rank * step, (rank + 1) * step))

    register_placement(Half, halves, last=True)
    full = torch.arange(24).view(4, 6)
    for _, mesh in each_rank((2, 2)):
        dtensor = distribute_tensor(full, mesh, [Replicate(), Shard(1)], src_data_rank=None)
        row, column = mesh.get_coordinate()
        dtensor._spec.placements = (Half(), Shard(1))
        expected = full.chunk(2, 1)[column].flatten().chunk(2)[row]
        assert torch.equal(slice_of(full, Region.of(dtensor)), expected)


def test_registering_again_replaces_the_function():
    class Changed(Custom):
        pass

    first, second = IndexRange(0, 2), IndexRange(2, 4)
    with fake_mesh((2,)) as mesh:
        dtensor = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        dtensor._spec.placements = (Changed(),)
        for piece in (first, second):
            register_placement(Changed, lambda region, *_, piece=piece: region.select(0, piece))
            assert Region.of(dtensor).pieces == ((piece,),)


def test_placements_are_found_by_entry_point(monkeypatch):
    class Foreign(Custom):
        pass

    class Entry:
        def load(self):
            return lambda register: register(Foreign, lambda region, *_: region)

    def find(group, name):
        assert group == "dist_rng.placements"
        return [Entry()] if name.endswith("Foreign") else []

    monkeypatch.setattr("dist_rng.regions.registry.entry_points", find)
    with fake_mesh((2,)) as mesh:
        dtensor = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        dtensor._spec.placements = (Foreign(),)
        assert Region.of(dtensor) == Region.full((4,))


def test_a_rank_outside_the_mesh_holds_nothing():
    from torch.distributed.device_mesh import DeviceMesh

    with fake_mesh((4,), rank=3):
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        dtensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)
        region = Region.of(dtensor)
        assert (region.numel, region.global_numel) == (0, 8)


def test_a_rank_outside_the_mesh_draws_nothing_and_its_generator_advances():
    from torch.distributed.device_mesh import DeviceMesh

    with fake_mesh((4,), rank=3), patched_operators():
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        dtensor = DTensor.from_local(
            torch.empty(0), mesh, [Replicate()], run_check=False, shape=(3, 5), stride=(5, 1)
        )
        torch.manual_seed(0)
        assert dtensor.uniform_().to_local().numel() == 0
        after = torch.rand(3)
    torch.manual_seed(0)
    torch.empty(3, 5).uniform_()
    assert torch.equal(after, torch.rand(3))
