"""A fake world beside a real one, which is as before afterwards."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp.simulate.fake_world import fake_world
from fsdp.simulate.machine import MeshSize
from testkit import run_ranks


def test_a_world_without_another():
    hook = sys.excepthook
    with fake_world(MeshSize(4, 2), "cpu") as mesh:
        assert dist.get_world_size() == 8
        assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("replicate", "shard"), (2, 4))
        assert mesh.get_coordinate() == (0, 0)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_world_is_left_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), fake_world(MeshSize(2), "cpu"):
        raise RuntimeError("inside")
    assert not dist.is_initialized()
    with fake_world(MeshSize(3), "cpu"):
        assert dist.get_world_size() == 3


def _sums_around_a_fake_world():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    whole = torch.arange(4.0)

    def summed():
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        total = torch.full((1,), float(dist.get_rank() + 1))
        dist.all_reduce(total)
        return tensor.sum().full_tensor().item(), total.item()

    found = [summed()]
    with fake_world(MeshSize(2), "cpu") as other:
        fake = distribute_tensor(whole, other, [Shard(0)], src_data_rank=None)
        inside = (dist.get_world_size(), dist.get_rank(), tuple(fake.to_local().shape))
        own_mesh = fake.sum().device_mesh is other  # DTensor has cached the sum on the real mesh
    found.append(summed())
    group = dist.new_group([0, 1])
    return found, inside, own_mesh, dist.get_world_size(group), dist.get_backend()


@pytest.mark.ranks
def test_a_real_world_is_as_before():
    for found, inside, own_mesh, size, backend in run_ranks(_sums_around_a_fake_world, 2):
        assert found == [(6.0, 3.0)] * 2
        assert inside == (2, 0, (2,))
        assert own_mesh
        assert (size, backend) == (2, "gloo")
