"""Lengths of shards, and the global sizes of uneven ones."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from plan_api.runtime.local_shards import ShardSizes, chunk_length, chunk_offset
from testkit import fake_mesh, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture
def mesh():
    """Along "x" this rank is the first of two, along "y" the first of four."""
    with fake_mesh((2, 4), ("x", "y")) as mesh:
        yield mesh


@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_chunks_are_those_of_torch(length, ranks):
    chunks = torch.arange(length).chunk(ranks) if length else ()
    chunks = [*chunks, *[torch.empty(0)] * ranks][:ranks]
    lengths = [chunk_length(length, ranks, rank) for rank in range(ranks)]
    assert lengths == [len(chunk) for chunk in chunks]
    assert [chunk_offset(length, ranks, rank) for rank in range(ranks)] == [
        sum(lengths[:rank]) for rank in range(ranks)
    ]


def test_shards_are_even_until_something_is_sharded_unevenly(mesh):
    sizes = ShardSizes(mesh)
    assert sizes.shard(0, 1, 8) is None
    assert sizes.length("a", 0, 1, torch.ones(2, 3)) is None
    assert sizes.global_shape("a", torch.ones(2, 3), [S0, S1]) == (4, 12)
    assert sizes.shard(0, 1, 5) == 5
    assert sizes.length("a", 0, 1, torch.ones(2, 3)) == 5
    assert sizes.length("a", 1, 1, torch.ones(2, 3)) is None  # along another axis
    assert sizes.global_shape("a", torch.ones(2, 3), [S1, S0]) == (8, 5)


def test_an_uneven_size_of_a_call_is_forgotten_with_the_next_and_a_parameter_is_not(mesh):
    sizes = ShardSizes(mesh, [((S0, R), (7, 2)), ((R, S0), (8, 8))])
    sizes.shard(0, 0, 5)
    assert sizes.length("a", 0, 0, torch.ones(3)) == 5
    assert sizes.length("a", 0, 0, torch.ones(4)) == 7
    sizes.begin_call((torch.ones(2),), {})
    assert sizes.length("a", 0, 0, torch.ones(3)) is None
    assert sizes.length("a", 0, 0, torch.ones(4)) == 7
    assert sizes.length("a", 1, 0, torch.ones(2)) is None


def test_the_global_shape_has_inner_shards_of_outer_ones(mesh):
    sizes = ShardSizes(mesh, [((S0, S0), (10, 2))])  # 5 rows on this rank of "x", 2 of them on "y"
    sizes.shard(1, 0, 5)
    assert sizes.global_shape("a", torch.ones(2, 2), [S0, S0]) == (10, 2)


def test_a_dtensor_has_the_global_shape_and_the_order_of_strides(mesh):
    sizes = ShardSizes(mesh)
    sizes.shard(0, 1, 5)
    dtensor = sizes.as_dtensor("a", torch.ones(3, 2).t(), [S1, R])
    assert (dtensor.shape, dtensor.stride()) == ((2, 5), (1, 2))


@pytest.mark.ranks
def test_a_size_that_does_not_follow_from_the_shapes_of_inputs_is_refused():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        sizes, rank = ShardSizes(mesh), mesh.get_rank()
        found = []
        for batch, length in ((5, 5), (5, 5), (3, 3), (5, 3)):
            sizes.begin_call((torch.ones(batch),), {})
            sizes.shard(0, 0, 5)
            local = torch.ones(chunk_length(length, 2, rank))
            if (batch, length) == (5, 3):
                with pytest.raises(ValueError, match=r"a: expected a shard of size . on this rank"):
                    sizes.length("a", 0, 0, local)
            else:
                found.append(sizes.length("a", 0, 0, local))
        return found

    assert run_ranks(check, 2) == [[5, 5, 3]] * 2


@pytest.mark.ranks
def test_elements_are_counted_however_long_shards_are():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        sizes = ShardSizes(mesh)
        even = sizes.count("a", torch.ones(3, 2), [S0])
        sizes.shard(0, 0, 3)
        return even, sizes.count("a", torch.ones([8, 4][mesh.get_rank()], 2), [S0])

    assert run_ranks(check, 2) == [(12, 24)] * 2
