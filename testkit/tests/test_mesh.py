import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _random, distribute_tensor

from testkit import clear_caches, each_rank, fake_mesh
from testkit.mesh import FakeStore


def hits_and_misses():
    return torch._C._get_DTensor_sharding_propagator_cache_stats()


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4), (2, 2, 2), (16384,), (128, 128)])
def test_any_shape_has_a_mesh_of_that_shape(shape):
    with fake_mesh(shape) as mesh:
        assert tuple(mesh.shape) == shape
        assert tuple(mesh.get_coordinate()) == (0,) * len(shape)
        assert dist.get_world_size() == mesh.size()
    assert not dist.is_initialized()


def test_the_last_of_many_ranks_computes_its_own_shard():
    with fake_mesh((16384,), rank=16383) as mesh:
        local = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        assert local.shape == (32768, 3)
        assert mesh.get_local_rank() == 16383


def test_names_and_device_type():
    with fake_mesh((2, 4), ("dp", "tp"), rank=5, device_type="cuda") as mesh:
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh["tp"].size() == 4
        assert tuple(mesh.get_coordinate()) == (1, 1)
        assert mesh.device_type == "cuda"


def test_each_rank_puts_all_shards_together():
    whole = torch.arange(20.0).view(10, 2)
    shards = [
        distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).to_local()
        for _, mesh in each_rank((3,))
    ]
    assert [len(shard) for shard in shards] == [4, 4, 2]
    assert torch.equal(torch.cat(shards), whole)


def test_each_rank_counts_the_ranks_and_can_be_left_early():
    assert [rank for rank, _ in each_rank((2, 2), ("a", "b"))] == [0, 1, 2, 3]
    for rank, mesh in each_rank((2, 2)):
        assert mesh.get_rank() == rank
        if rank == 1:
            break
    assert not dist.is_initialized()


def test_the_group_ends_when_the_body_raises_or_destroys_it():
    with pytest.raises(KeyError), fake_mesh((2,)):
        raise KeyError
    assert not dist.is_initialized()
    with fake_mesh((2,)):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_caches_do_not_outlive_the_mesh():
    def use():
        with fake_mesh((2,)) as mesh:
            tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
            total = tensor + tensor
            tensor.redistribute(mesh, [Replicate()])
            assert total.device_mesh is mesh  # a stale cache would give the mesh of before
            return hits_and_misses()

    assert use() == use()


def test_without_clearing_the_caches_a_result_names_a_dead_mesh():
    # Shows that the test above can fail.
    meshes = []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
        meshes.append((mesh, (tensor + tensor).device_mesh))
        dist.destroy_process_group()
    clear_caches()
    assert meshes[1][1] is meshes[0][0]
    assert meshes[1][1] is not meshes[1][0]


def test_the_random_tracker_is_forgotten():
    with fake_mesh((2,)):
        _random._rng_tracker = object()
    assert _random._rng_tracker is None


def test_a_second_mesh_is_refused():
    with fake_mesh((2,)):
        with (
            pytest.raises(
                RuntimeError, match="expected no process group, got a fake group of 2 ranks"
            ),
            fake_mesh((2,)),
        ):
            pass
        assert dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, 0)}, r"got \(2, 0\)"),
        ({"shape": 4}, r"a sequence, got 4; pass \(4,\)"),
        ({"shape": ()}, r"per axis, got \(\)"),
        ({"shape": (2, 2), "rank": 4}, r"from 0 to 3 for a mesh of shape \(2, 2\), got 4"),
        ({"shape": (2,), "rank": -1}, "got -1"),
        ({"shape": (2, 2), "names": ("a",)}, r"one name per axis of shape \(2, 2\), got \('a',\)"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message), fake_mesh(**arguments):
        pass
    assert not dist.is_initialized()
