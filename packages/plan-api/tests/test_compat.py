"""Canaries for the shims of _compat.py: each fails when its shim can go."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion

from plan_api._compat import (
    ShapeMode,
    has_symmetric_memory,
    is_uneven_view_error,
    on_host,
    symmetric_memory_operators,
)
from testkit import fake_mesh, run_python

# Images whose gradient nobody asks for, on two axes.
CONVOLUTION = """
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from plan_api._compat import use_rule_for_convolution_backward
from testkit import fake_mesh

def gradient():
    images = DTensor.from_local(torch.randn(2, 3, 8, 8), mesh, [Shard(0), Replicate()])
    kernel = DTensor.from_local(torch.randn(4, 3, 2, 2), mesh, [Replicate()] * 2)
    kernel.requires_grad_()
    torch.nn.functional.conv2d(images, kernel, stride=2).to_local().sum().backward()
    return kernel.grad.placements

with fake_mesh((2, 2)) as mesh:
    try:
        gradient()
        print("native")
    except AssertionError as error:
        print(error)
    use_rule_for_convolution_backward()
    assert gradient() == (Partial(), Replicate())
"""

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@pytest.mark.filterwarnings("default")
def test_torch_cannot_shard_the_gradients_of_a_convolution_on_two_axes():
    # In a process of its own: what is taken off torch's registry stays off.
    result = run_python("-c", CONVOLUTION)
    assert result.returncode == 0, result.stderr
    if TorchVersion(torch.__version__) < "2.14":
        assert result.stdout == "native\n"
    else:
        assert "mixes None with placements" in result.stdout


def test_torch_refuses_to_view_a_sharded_dim_as_units_that_the_axis_does_not_divide():
    with fake_mesh((2,)) as mesh:
        sharded = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(1)])
        with pytest.raises(RuntimeError) as raised:
            sharded.view(4, 3, 4)
    old = TorchVersion(torch.__version__) < "2.12"
    assert ("Attempted to split the sharded dim" if old else "unevenly sharded") in str(
        raised.value
    )
    assert is_uneven_view_error(str(raised.value))


def test_tensors_of_the_host_have_values_within_fake_mode():
    values = on_host(lambda: torch.arange(3).tolist())
    with FakeTensorMode():
        assert values() == [0, 1, 2]
        assert isinstance(torch.arange(3), FakeTensor)


@pytest.mark.parametrize(
    ("left", "right", "groups"),
    [((6, 8), (2, 8, 4), 2), ((4, 8), (8, 4), 2), ((2, 3, 8), (2, 8, 4), None)],
)
def test_torch_has_no_shapes_of_grouped_products_in_float32(left, right, groups):
    # Forward, and the gradients of a grouped weight and of batches, all of which kernels compute.
    offs = None if groups is None else torch.tensor([2, left[-1] if len(right) == 2 else left[0]])
    real = torch._grouped_mm(
        torch.randn(left), torch.randn(right), offs=offs.int() if groups else offs
    )

    def product(mode):
        with mode:
            a, b = torch.empty(left), torch.empty(right)
            ends = None if groups is None else torch.empty(groups, dtype=torch.int32)
        return torch._grouped_mm(a, b, offs=ends)

    with pytest.raises(RuntimeError, match="BF16"):
        product(FakeTensorMode())
    assert isinstance(product(ShapeMode()), FakeTensor)
    assert (product(ShapeMode()).shape, product(ShapeMode()).dtype) == (real.shape, real.dtype)


def test_torch_defines_operators_on_symmetric_memory_in_a_private_module():
    from torch.distributed import _symmetric_memory

    operators = symmetric_memory_operators()
    assert [str(getattr(operators, name).default._schema) for name in FUSED] == [
        "symm_mem::fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, "
        "*, bool return_A=True) -> (Tensor?, Tensor[])",
        "symm_mem::fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
        "str group_name) -> Tensor",
    ]
    # It can go once torch has a public module.
    assert not hasattr(torch.distributed, "symmetric_memory")
    assert all(hasattr(_symmetric_memory, name) for name in ("empty", "get_backend", "rendezvous"))


def test_ranks_on_cpus_have_no_symmetric_memory():
    with fake_mesh((2,)) as mesh:
        assert not has_symmetric_memory(mesh.get_group(), "cpu")
