"""Canaries: what `_compat` takes from torch's private modules is there and means what it did."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute

from ragged_shard import _compat
from testkit import fake_mesh


def test_a_mesh_that_was_flattened_is_found_by_its_axes():
    with fake_mesh((2, 2)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert _compat.flattened_mesh(mesh, (0, 1)) is None
        flattened = mesh._flatten("ab")
        assert _compat.flattened_mesh(mesh, (0, 1)) is flattened
        assert flattened.get_group().size() == 4


def test_the_default_group_is_that_of_a_mesh_of_all_ranks_in_order():
    with fake_mesh((2, 2)) as mesh:
        assert _compat.default_group(mesh) is dist.group.WORLD
        turned = DeviceMesh("cpu", mesh.mesh.flip(0))
        assert _compat.default_group(turned) is None
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert _compat.default_group(named["a"]) is None


def test_torch_has_a_flag_against_merging_collectives():
    assert _compat.merges_collectives()
    with _redistribute.disable_redistribute_transform_optimization():
        assert not _compat.merges_collectives()


def test_dcp_has_plain_tensors_with_four_attributes_since_2_14():
    version = torch.torch_version.TorchVersion(torch.__version__)
    assert _compat.has_checkpointable_tensors() == (version >= (2, 14))
    if _compat.has_checkpointable_tensors():
        assert set(dcp.CheckpointableTensor.__annotations__) == {
            "global_shape",
            "global_offsets",
            "local_offsets",
            "local_sizes",
        }
