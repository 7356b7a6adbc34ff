"""Canaries: what `_compat.py` and `views.py` rely on in torch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dbuffer import _compat
from dbuffer.views import tensor_in
from testkit import CommLog, fake_mesh


def test_collectives_go_by_the_name_that_does_not_warn():
    with fake_mesh((2,)), CommLog() as log:
        group, whole, own = dist.group.WORLD, torch.zeros(4), torch.zeros(2)
        _compat.all_gather(whole, own, group).wait()
        _compat.reduce_scatter(own, whole, dist.ReduceOp.SUM, group).wait()
        _compat.all_reduce(own, dist.ReduceOp.SUM, group).wait()
    log.assert_counts({"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1})


def test_from_local_takes_a_scalars_shape_for_none():
    """If this fails, `_compat.dtensor` may become `DTensor.from_local`."""
    with fake_mesh((2,)) as mesh:
        guessed = DTensor.from_local(
            torch.ones(3), mesh, [Replicate()], run_check=False, shape=torch.Size(()), stride=()
        )
        assert guessed.shape == (3,)
        actual = _compat.dtensor(torch.ones(()), mesh, (Replicate(),), (), ())
        assert actual.shape == ()


def test_deepcopy_of_a_dtensor_with_an_offset_fails_in_torch():
    """If this fails, `_compat.dtensor_of` may become `DTensor`."""
    local = torch.arange(8.0)[2:6]
    with fake_mesh((2,)) as mesh:
        torchs = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        with pytest.raises(RuntimeError, match="invalid python storage"):
            copy.deepcopy(torchs)
        own = _compat.dtensor_of(local, torchs._spec)
        copied = copy.deepcopy(own)
    assert own._local_tensor is local
    assert copied.placements == own.placements
    assert torch.equal(copied._local_tensor, local)
    copied._local_tensor.zero_()
    assert local.all()


def test_a_tensor_set_on_a_storage_has_a_version_of_its_own():
    memory = torch.zeros(16, dtype=torch.uint8)
    flat, part = (tensor_in(memory, torch.float32, 0, shape) for shape in ((4,), (2, 2)))
    versions = part._version, memory._version
    flat.fill_(1.0)
    assert (part._version, memory._version) == versions
    assert part.sum() == 4.0
    param = torch.nn.Parameter(part)
    assert param.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_is_resized_under_its_tensors(device):
    memory = torch.empty(16, dtype=torch.uint8, device=device)
    part = tensor_in(memory, torch.float32, 2, (2,))
    memory.untyped_storage().resize_(0)
    assert part.untyped_storage().nbytes() == 0
    memory.untyped_storage().resize_(16)
    assert part.untyped_storage().nbytes() == 16
    assert part.shape == (2,)
