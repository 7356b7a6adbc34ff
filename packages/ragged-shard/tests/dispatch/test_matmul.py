"""Matrix products of ragged rows."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard
from testkit import CommLog, assert_close, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
ROWS, ELEMENTS = (0,), (0, 1)


def operand(dtype=torch.float32):
    return ((torch.arange(96).reshape(12, 8) * 37) % 17 - 8).to(dtype)


def _replica(tensor, mesh):
    return DTensor.from_local(tensor, mesh, [R], run_check=False)


MATMUL = {
    "mm": lambda x, w, b: x @ w,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "linear": lambda x, w, b: nn.functional.linear(x, w.t().contiguous(), b),
    "batched rows": lambda x, w, b: x.view(3, 4, 8) @ w,
    "mv": lambda x, w, b: torch.mv(x, w[:, 0].contiguous()),
}


def matmul(name):
    function = MATMUL[name]
    mesh = init_device_mesh("cpu", (2,))
    weight, bias = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(6.0)
    expected = function(operand(), weight, bias)
    for placement in (RaggedShard(ROWS, (5, 7)), RaggedShard(ROWS, (0, 3))):
        if name == "batched rows":
            placement = RaggedShard(ROWS, (1, 2))
        ragged = distribute_tensor(operand(), mesh, [placement])
        with CommLog() as log, ragged_shard.strict():
            result = function(ragged, _replica(weight, mesh), _replica(bias, mesh))
        log.assert_counts({})
        assert isinstance(result.placements[0], RaggedShard), result.placements
        assert_close(result.full_tensor(), expected, rtol=1e-5, atol=1e-5, what=name)


@pytest.mark.parametrize("name", MATMUL)
def test_products_of_whole_rows_need_no_communication(name):
    run_ranks(matmul, 2, name)
