"""DistributedDataParallel's buckets reduced over more axes than its group has."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fused_comm.ddp import ddp_hook
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_buckets_are_reduced_over_all_axes_in_one_collective(op, reduce_dtype):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        torch.manual_seed(0)
        plain = torch.nn.Linear(5, 3)
        model = DistributedDataParallel(plain, process_group=mesh.get_group("dp"))
        model.register_comm_hook(None, ddp_hook(mesh, op=op, reduce_dtype=reduce_dtype))
        torch.manual_seed(1)
        x = torch.randn(4, 2, 5)
        with CommLog() as log:
            model(x[torch.distributed.get_rank()]).square().sum().backward()
        actual = [p.grad.clone() for p in plain.parameters()]
        plain.zero_grad()
        plain(x).square().sum().backward()
        count = 4 if op == "avg" else 1
        close = all(
            torch.allclose(a, p.grad / count, atol=1e-5)
            for a, p in zip(actual, plain.parameters(), strict=True)
        )
        return close, log.counts()["all_reduce"]

    assert run_ranks(check, 4) == [(True, 1)] * 4
