"""An empty DTensor has the strides of one device's tensor, whatever was called before."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dist_rng._compat import torch_release
from dist_rng.dtensor.empty_like import empty_like
from testkit import fake_mesh

FORMATS = [None, torch.preserve_format, torch.contiguous_format, torch.channels_last]
SOURCES = {
    "contiguous": lambda: torch.zeros(2, 4, 3, 5),
    "permuted": lambda: torch.zeros(5, 4, 2, 3).permute(2, 1, 3, 0),
    "not dense": lambda: torch.zeros(2, 4, 3, 10)[..., ::2],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_shape_strides_and_dtype_are_those_of_one_device(source):
    with fake_mesh((3,), rank=2) as mesh:
        dtensor = distribute_tensor(source(), mesh, [Shard(1)], src_data_rank=None)
        for memory_format in FORMATS:
            for dtype in (None, torch.bfloat16):
                expected = torch.empty_like(
                    dtensor_like(source(), dtensor), memory_format=memory_format, dtype=dtype
                )
                result = empty_like(dtensor, memory_format=memory_format, dtype=dtype)
                assert isinstance(result, DTensor)
                assert (result.shape, result.stride()) == (expected.shape, expected.stride())
                assert result.dtype == result._local_tensor.dtype == expected.dtype
                assert result._spec.tensor_meta.dtype == expected.dtype
                assert result.placements == (Shard(1),)
                assert result._local_tensor.shape == dtensor._local_tensor.shape
        assert dtensor._spec.tensor_meta.dtype == torch.float32


def dtensor_like(tensor, dtensor):
    """Returns a global tensor with the strides of the DTensor."""
    return torch.empty_strided(tensor.shape, dtensor.stride())


def test_a_partial_placement_stays_partial():
    with fake_mesh((2, 2)) as mesh:
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate(), Partial()])
        assert empty_like(partial).placements == (Replicate(), Partial())


def test_a_plain_tensor_uses_torchs_empty_like():
    assert empty_like(torch.zeros(3, 2).t(), dtype=torch.int64).stride() == (1, 2)
    assert empty_like(torch.zeros(3, 2).t(), dtype=torch.int64).dtype == torch.int64


@pytest.mark.skipif(torch_release() < (2, 12), reason="torch 2.11's empty_like has no defect")
def test_canary_torchs_empty_like_still_ignores_the_memory_format():
    """If this fails, ``dist_rng.dtensor.empty_like`` is not needed any more."""
    with fake_mesh((2,)) as mesh:
        dtensor = distribute_tensor(torch.zeros(6, 7).t(), mesh, [Shard(0)], src_data_rank=None)
        torch.empty_like(dtensor)
        second = torch.empty_like(dtensor, memory_format=torch.contiguous_format)
        assert second.stride() == (1, 7)
        assert second._local_tensor.is_contiguous()
