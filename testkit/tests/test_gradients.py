import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from testkit import CommLog, fake_mesh, loss_with_grad


@pytest.mark.parametrize("placement", [Partial(), Replicate(), Shard(0)], ids=str)
def test_a_gradient_is_accumulated_as_it_is_placed(placement):
    with fake_mesh((2,)) as mesh, CommLog() as log:
        param = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh, [placement]))
        for count in (1, 2):
            grad = DTensor.from_local(torch.ones(2, 3), mesh, [placement], run_check=False)
            (loss_with_grad(param, grad) + loss_with_grad(param, grad)).backward()
            assert param.grad.placements == (placement,)
            assert torch.equal(param.grad._local_tensor, torch.full((2, 3), 2.0 * count))
    assert not log.counts()


def test_a_plain_parameter_takes_the_memory():
    param, grad = torch.nn.Parameter(torch.zeros(3)), torch.ones(3)
    loss_with_grad(param, grad).backward()
    assert param.grad.data_ptr() == grad.data_ptr()
