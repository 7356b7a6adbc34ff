"""What happens to a tensor that passes a site."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plan_api import Plan, lower
from plan_api.runtime.redistribute import Redistribution
from testkit import CommLog

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def mover(plan, model):
    (site,) = lower(plan, model).sites
    (step,) = site.steps
    return Redistribution(step, plan.mesh, "layers.0.forward_pre")


def placed(mesh, placements, shape=(4, 4)):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def test_a_plain_tensor_is_replicated_and_sharded_without_communication(mesh, model):
    move = mover(Plan(mesh).shard("layers.0.<in>", S0, "dp"), model)
    x = torch.arange(16.0).reshape(4, 4)
    with CommLog() as log:
        moved = move(x)
    log.assert_counts({})
    assert moved.placements == (S0, R)
    assert moved.shape == (4, 4)
    assert torch.equal(moved.to_local(), x[:2])


def test_the_gradient_of_a_partial_is_unchanged_along_other_axes(mesh, model):
    plan = Plan(mesh).redistribute("layers.0.<in>", S0, R, "dp", grad_src=R, grad_dst=S0)
    given = DTensor.from_local(torch.ones(2, 4), mesh, (S0, P), run_check=False).requires_grad_()
    moved = mover(plan, model)(given)
    assert moved.placements == (R, P)
    moved.redistribute(placements=(R, R)).sum().backward()
    assert given.grad.placements == (S0, R)


def test_a_plain_tensor_has_the_placements_of_src(mesh, model):
    move = mover(Plan(mesh).redistribute("layers.0.<in>", S0, R, "dp"), model)
    with CommLog() as log:
        moved = move(torch.ones(2, 4))
    assert log.counts() == {"all_gather": 1}
    assert (moved.shape, moved.placements) == ((4, 4), (R, R))


def test_annotate_does_not_redistribute(mesh, model):
    move = mover(Plan(mesh).annotate("layers.0.<in>", S0, "dp"), model)
    local = torch.ones(2, 4)
    with CommLog() as log:
        moved = move(local)
    log.assert_counts({})
    assert (moved.shape, moved.placements) == ((4, 4), (S0, R))
    assert moved.to_local().data_ptr() == local.data_ptr()
    assert move(moved) is moved  # it is what it is said to be
    other = placed(mesh, (R, R))
    with pytest.raises(ValueError, match=r"<in>:0 is R along 'dp', and the plan says S\(0\)"):
        move(other)


def test_other_axes_keep_their_placements(mesh, model):
    move = mover(Plan(mesh).shard("layers.0.<in>", R, "tp"), model)
    for before in ((S0, S1), (S0, P), (R, S0)):
        assert move(placed(mesh, [S0 if p == P else p for p in before])).placements[1] == R
    moved = move(placed(mesh, (S0, S1)))
    assert moved.placements == (S0, R)


def test_a_tensor_in_its_placements_is_the_same_object(mesh, model):
    move = mover(Plan(mesh).shard("layers.0.<in>", (S0, R)), model)
    x = placed(mesh, (S0, R))
    assert move(x) is x


def test_a_wrong_src_is_an_error(mesh, model):
    move = mover(Plan(mesh).redistribute("layers.0.<in>", S0, R, "tp"), model)
    with pytest.raises(ValueError, match=r"<in>:0 is S\(1\) along 'tp', and the plan says S\(0\)"):
        move(placed(mesh, (R, S1)))


def test_another_mesh_is_an_error(mesh, model):
    move = mover(Plan(mesh).shard("layers.0.<in>", R, "tp"), model)
    move(placed(mesh, (S0, S1)))  # these placements are known from now on
    for other in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (4, 1))):
        with pytest.raises(ValueError, match=r"<in>:0: expected a DTensor on the plan's mesh"):
            move(placed(other, (S0, S1)[: other.ndim]))
    equal = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert move(placed(equal, (S0, S1))).placements == (S0, R)


def test_a_gradient_has_the_placements_of_grad_dst(mesh, model):
    """Autograd would leave a part of a sum a sum; the plan asks for a shard of it."""
    plain = mover(Plan(mesh).redistribute("layers.0.<in>", S0, R, "tp"), model)
    asked = mover(Plan(mesh).redistribute("layers.0.<in>", S0, R, "tp", grad_dst=R), model)
    found = []
    for move in (plain, asked):
        x = placed(mesh, (R, S0)).requires_grad_()
        x.register_hook(lambda grad: found.append(grad.placements))
        y = move(x)
        assert y.placements == (R, R)
        y.backward(DTensor.from_local(torch.ones(4, 4), mesh, (R, P), run_check=False))
    assert found == [(R, S0), (R, R)]
