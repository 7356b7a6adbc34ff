"""Compiled functions of what the library made, where equal meshes are different objects.

AOTAutograd knows the mesh of a result by identity, among those of the arguments.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_rules
from testkit import fake_mesh


def run_compiled():
    """An eager operator, then a compiled function, on a mesh of its own."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
    run = torch.compile(lambda a, b: (a @ b).relu(), backend="aot_eager", fullgraph=True)
    result = run(torch.neg(x), weight)
    result.sum().backward()
    return result.detach().to_local(), weight.grad.to_local()


@pytest.fixture(autouse=True)
def meshes():
    with fake_mesh((2,)):
        yield


def test_after_torch_alone():
    expected = run_compiled()
    with dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        for actual in (run_compiled(), run_compiled()):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert dtensor_rules.stats()["aten.neg.default"].cache == 1


def test_before_torch_alone():
    with dtensor_rules.enabled():
        expected = run_compiled()
    torch.testing.assert_close(run_compiled(), expected, rtol=0, atol=0)


def test_around_a_cleared_cache():
    with dtensor_rules.enabled():
        expected = run_compiled()
        dtensor_rules.cache_clear()
        torch.testing.assert_close(run_compiled(), expected, rtol=0, atol=0)
