"""Collectives by name on DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import functional
from fused_comm.process_groups import flat_group
from testkit import run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.mark.ranks
def test_each_collective_equals_its_redistribution():
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        first, both = mesh.get_group(0), flat_group(mesh, (0, 1)).group
        whole = torch.arange(24.0).view(6, 4)
        part = DTensor.from_local(whole + dist.get_rank(), mesh, [P, P], run_check=False)
        shard = distribute_tensor(whole, mesh, [S0, S1])
        calls = [
            (functional.all_reduce(part, both), part, (R, R)),
            (functional.all_reduce(part, first), part, (R, P)),
            (functional.reduce_scatter(part, 1, first), part, (S1, P)),
            (functional.all_gather(shard, both), shard, (R, R)),
            (functional.all_gather(shard, first), shard, (R, S1)),
            (functional.all_to_all(distribute_tensor(whole, mesh, [S0, R]), -1, first),
             distribute_tensor(whole, mesh, [S0, R]), (S1, R)),
        ]  # fmt: skip
        return [
            result.placements == target
            and torch.equal(result.to_local(), source.redistribute(placements=target).to_local())
            for result, source, target in calls
        ]

    assert run_ranks(check, 4) == [[True] * 6] * 4


@pytest.mark.ranks
def test_a_group_of_no_axes_and_a_wrong_placement_are_refused():
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(4, 4), mesh, [S0, R])
        other = dist.new_group([0, 3]), dist.new_group([1, 2])
        strange = other[0] if dist.get_rank() in (0, 3) else other[1]
        with pytest.raises(ValueError, match=r"all_gather: the group of ranks \[\d, \d\] is not"):
            functional.all_gather(x, strange)
        with pytest.raises(ValueError, match=r"all_reduce: expected Partial on axis 0 .* got S"):
            functional.all_reduce(x, mesh.get_group(0))
        return True

    assert run_ranks(check, 4) == [True] * 4
