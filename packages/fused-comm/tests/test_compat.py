"""Canaries for the shims of _compat.py: each fails when its shim can go."""

import gc
import inspect
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fused_comm import _compat
from testkit import fake_mesh


def test_the_preferred_names_are_taken_where_they_exist():
    newest = hasattr(dist, "reduce_scatter_single")
    expected = "reduce_scatter_single" if newest else "reduce_scatter_tensor"
    assert _compat._REDUCE_SCATTER.__name__ == expected
    expected = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )
    assert _compat._ALL_GATHER.__name__ == expected


def test_views_of_a_buffer_are_detected_until_they_are_freed():
    buffer = torch.empty(8)
    assert not _compat.is_viewed(buffer)
    view = torch.nn.Parameter(buffer[2:4].view(2, 1))
    assert _compat.is_viewed(buffer)
    del view
    assert not _compat.is_viewed(buffer)


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "DTensor"])
def test_a_weak_reference_is_valid_as_long_as_the_parameter_has_the_gradient(placed):
    """`GradientState` marks a finished gradient by one; otherwise it would be summed again."""
    with fake_mesh((2,)) as mesh:

        def made():
            local = torch.ones(4)
            return DTensor.from_local(local, mesh, [Partial()]) if placed else local

        param = torch.nn.Parameter(made())
        param.grad = made()
        finished = weakref.ref(param.grad)
        gc.collect()
        assert finished() is param.grad
        param.grad = None
        gc.collect()
        assert finished() is None


def test_a_dtensor_is_made_as_torch_makes_it():
    with fake_mesh((2,)) as mesh:
        param = torch.nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Partial()]))
        local = torch.ones(3, 4)
        actual = _compat.dtensor(local, param, mesh, (Partial(),))
        expected = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        assert actual._spec == expected._spec
        assert actual._spec.tensor_meta == expected._spec.tensor_meta
        assert actual.stride() == expected.stride()
        assert not actual.requires_grad
        transposed = torch.nn.Parameter(param.detach().t())
        assert _compat.dtensor(torch.ones(4, 3), transposed, mesh, (Partial(),)).stride() == (3, 1)


def test_the_names_that_are_private_are_as_they_were():
    assert TensorMeta._fields == ("shape", "stride", "dtype")
    assert "tensor_meta" in inspect.signature(DTensorSpec).parameters
