"""Errors are raised on every rank, and no rank hangs."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import GradReducer
from testkit import fake_mesh, loss_with_grad, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def parameter(mesh, placements=(R,), shape=(4, 4)):
    return torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements))


def give(param, placements, shape=None):
    local = torch.ones(shape or param.to_local().shape)
    param.grad = DTensor.from_local(
        local, param.device_mesh, placements, run_check=False, shape=param.shape,
        stride=param.stride(),
    )  # fmt: skip


@pytest.fixture
def mesh():
    with fake_mesh((2,)) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "mean"}, "expected op='sum', 'avg' or None, got 'mean'"),
        ({"bucket_mb": 0}, "expected bucket_mb > 0, got 0"),
        ({"zero_copy": True, "accumulate_dtype": torch.float32}, "leave accumulate_dtype"),
    ],
)
def test_invalid_arguments_are_refused(mesh, arguments, message):
    with pytest.raises(ValueError, match=message):
        GradReducer([parameter(mesh)], **arguments)


def test_no_parameters_and_plain_ones_without_a_group_are_refused(mesh):
    with pytest.raises(ValueError, match="expected parameters, got none"):
        GradReducer([])
    with pytest.raises(ValueError, match=r"'bias' is a plain tensor: pass group="):
        GradReducer([("weight", parameter(mesh)), ("bias", torch.nn.Parameter(torch.ones(2)))])


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        ((R,), (S0,), r"expected R or Partial on axis 0, got S\(0\); only Partial"),
        ((R,), (Partial("max"),), r"is Partial\(max\): expected Partial\(sum\)"),
    ],
)
def test_gradients_that_sums_cannot_place_are_named(mesh, target, source, message):
    param = parameter(mesh, target)
    reducer = GradReducer([("layer.weight", param)])
    give(param, source)
    with pytest.raises(ValueError, match=rf"gradient of 'layer.weight'.*{message}"):
        reducer.finish()


def test_a_target_whose_shards_are_no_chunks_is_refused():
    with fake_mesh((2, 2)) as mesh:
        param = parameter(mesh, (S0, S0))
        reducer = GradReducer([("w", param)])
        give(param, (P, S0), (2, 4))
        with pytest.raises(ValueError, match="are no chunks of the local sum"):
            reducer.finish()


def test_another_mesh_is_refused():
    with fake_mesh((2, 2)) as mesh:
        param = parameter(mesh, (R, R))
        reducer = GradReducer([("w", param)])
        other = init_device_mesh("cpu", (4,))
        param.grad = DTensor.from_local(torch.ones(4, 4), other, [P], run_check=False)
        with pytest.raises(ValueError, match=r"'w' is on .* its gradient on"):
            reducer.finish()


def test_a_gradient_with_other_placements_than_before_is_named():
    with fake_mesh((2, 2)) as mesh:
        param = parameter(mesh, (R, R))
        reducer = GradReducer([("w", param)])
        give(param, (P, R))
        reducer.finish()
        param.grad = None
        give(param, (P, P))
        message = r"expected \(Partial\(sum\), Replicate\(\)\).*, got \(Partial\(sum\), Partial"
        with pytest.raises(ValueError, match=message):
            reducer.finish()


def test_a_gradient_that_needed_no_reduction_before_is_named():
    with fake_mesh((2,)) as mesh:
        params = [parameter(mesh), parameter(mesh)]
        reducer = GradReducer([("v", params[0]), ("w", params[1])])
        give(params[0], (P,))
        give(params[1], (R,))
        reducer.finish()
        assert params[1].grad.placements == (R,)
        for param in params:
            param.grad = None
            give(param, (P,))
        with pytest.raises(ValueError, match=r"'w': expected \(Replicate\(\),\).*, got \(Partial"):
            reducer.finish()


def test_zero_copy_in_another_dtype_is_refused(mesh):
    param = parameter(mesh)
    reducer = GradReducer([("w", param)], zero_copy=True, reduce_dtype=torch.float64)
    give(param, (P,))
    with pytest.raises(ValueError, match=r"zero_copy with reduce_dtype=torch.float64.*'w'"):
        reducer.finish()


@pytest.mark.ranks
def test_finish_before_backward_is_an_error_on_every_rank():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        param = parameter(mesh)
        reducer = GradReducer([param])
        with pytest.raises(RuntimeError, match="no rank has a gradient"):
            reducer.finish()
        give(param, (P,))
        reducer.finish()
        param.grad = None
        with pytest.raises(RuntimeError, match="no rank has a gradient"):
            reducer.finish()
        return True

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.ranks
def test_parameters_in_another_order_are_named_on_every_rank():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        named = [("a", parameter(mesh)), ("b", parameter(mesh, shape=(2, 2)))]
        with pytest.raises(ValueError, match=r"number 0 is 'a'.* on rank 0 and 'b'.* on rank 1"):
            GradReducer(named if dist.get_rank() == 0 else named[::-1])
        with pytest.raises(ValueError, match=r"number 1 is 'b'.* on rank 0 and nothing on rank 1"):
            GradReducer(named[: 2 - dist.get_rank()])
        return True

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.ranks
def test_gradients_on_other_axes_are_named_on_every_rank():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        params = [parameter(mesh, (R, R)) for _ in range(2)]
        reducer = GradReducer(params)
        for param in params:
            give(param, (P, R))
        if dist.get_rank() == 1:
            give(params[1], (P, P))
        message = r"'parameter 1' differs .*reduced=\(0,\).* on rank 0 and .*reduced=\(0, 1\)"
        with pytest.raises(ValueError, match=message):
            reducer.finish()
        return True

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.ranks
def test_other_ranks_raise_when_one_raises_in_backward():
    """The others wait for its bucket until the timeout, and then name the bucket."""

    def check():
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
        param = torch.nn.Parameter(torch.ones(4))
        reducer = GradReducer([("layer.weight", param)], group=group)
        (param * param).sum().backward()
        reducer.finish()
        if dist.get_rank() == 1:
            time.sleep(6)  # as a rank that has raised, and is not gone yet
            return "raised in backward"
        (param * param).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            reducer.finish()
        return str(caught.value)

    message, raised = run_ranks(check, 2)
    assert raised == "raised in backward"
    assert "bucket of 32 bytes failed, with the gradients of layer.weight: " in message


def test_gradients_without_reduction_are_enough_for_finish():
    """As with tensor parallelism alone, where backward makes the parameters' placements."""
    with fake_mesh((2,)) as mesh:
        local = torch.ones(2, 3)
        param = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        reducer = GradReducer([param])
        for _ in range(2):
            param.grad = None
            grad = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            loss_with_grad(param, grad).backward()
            reducer.finish()
            assert torch.equal(param.grad.to_local(), local)
        param.grad = None
        with pytest.raises(RuntimeError, match="no rank has a gradient"):
            reducer.finish()
