"""torch.compile of functions of ragged tensors: whole graphs, gradients, and a warm cache."""

import importlib
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard
from testkit import assert_bitwise, assert_close, run_ranks

pytestmark = pytest.mark.ranks

ROWS = RaggedShard((0,), (3, 5))


def operand():
    return torch.linspace(-1, 1, 64).reshape(8, 8)


def moved(x):
    return x.redistribute(placements=[Replicate()]) @ x.redistribute(placements=[Replicate()])


def product(x):
    first, second = x.chunk(2)
    return first * second


FUNCTIONS = {
    "pointwise": lambda x: (x * 2 + x).relu(),
    "reduction": lambda x: (x * x).sum(),
    "rows": lambda x: x.sum(1),
    "gathered": moved,
    "other units": lambda x: x.redistribute(placements=[RaggedShard((0, 1), (1, 1))]) * 2,
    "interleaved": lambda x: product(x.redistribute(placements=[InterleavedShard(0, 2)])),
    "strided pieces": lambda x: x.redistribute(placements=[InterleavedShard(1, 2)]) * 2,
    "local": lambda x: x.to_local() * 2,
    "from local": lambda x: DTensor.from_local(
        x.to_local() * 2, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
    ),
}


def compiled(name):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    function = FUNCTIONS[name]
    x = distribute_tensor(operand(), mesh, [ROWS]).requires_grad_()
    y = distribute_tensor(operand(), mesh, [ROWS]).requires_grad_()
    expected = function(x)
    result = torch.compile(function, backend="aot_eager", fullgraph=True)(y)
    if isinstance(expected, DTensor):
        assert result.placements == expected.placements
        loss, other = result.full_tensor().sum(), expected.full_tensor().sum()
        assert_bitwise(result.full_tensor(), expected.full_tensor(), name)
    else:
        loss, other = result.sum(), expected.sum()
        assert_bitwise(result, expected, name)
    loss.backward()
    other.backward()
    assert y.grad.placements == x.grad.placements
    assert_close(y.grad.full_tensor(), x.grad.full_tensor(), rtol=1e-6, atol=1e-6, what=name)


NO_GUARD = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11's compiler has no guard for the placements of others, as x.placements needs",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=NO_GUARD if n == "from local" else ()) for n in FUNCTIONS]
)
def test_a_compiled_function_is_one_graph_and_equals_the_eager_one(name):
    run_ranks(compiled, 2, name, timeout=120)


def warm(folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own, on import
    importlib.import_module("torch._inductor.config").fx_graph_cache = True
    importlib.import_module("torch._functorch.config").enable_autograd_cache = True
    mesh = init_device_mesh("cpu", (2,))

    def function(x):
        return (x * 2 + 1).relu()

    # One rank after the other: the second finds the first's graphs, of another local shape.
    for units in ((3, 5), (5, 3)):
        for turn in range(2):
            if dist.get_rank() == turn:
                torch._dynamo.reset()
                x = distribute_tensor(
                    operand(), mesh, [RaggedShard((0,), units)], src_data_rank=None
                )
                result = torch.compile(function, fullgraph=True)(x)
                assert_close(
                    result.to_local(), function(x.to_local()), rtol=1e-6, atol=1e-6, what="warm"
                )
            dist.barrier()


@pytest.mark.slow  # each rank compiles twice
def test_ranks_that_share_a_warm_cache_do_not_take_each_others_graphs(tmp_path):
    run_ranks(warm, 2, tmp_path, timeout=240)
