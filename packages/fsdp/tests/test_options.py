"""Pairs of options: both are in effect, or refused before a parameter is changed."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from fsdp import Rows, Whole, fully_shard
from testkit import CommLog, fake_mesh, run_ranks
from testkit.models.residual_stack import batch, shard, stack


class Gathered(torch.Tensor):
    """A parameter with fsdp_pre_all_gather, which these tests never call."""

    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        raise AssertionError


def _extension():
    module = nn.Linear(4, 8)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Gathered))
    return module


def _dtensor(mesh):
    module = nn.Linear(4, 8)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    return module


def _refused(module, match, **options):
    before = dict(module.named_parameters())
    with CommLog() as log, pytest.raises(ValueError, match=match):
        fully_shard(module, **options)
    log.assert_counts({})
    now = dict(module.named_parameters())
    assert all(now[name] is param for name, param in before.items())
    assert not isinstance(module, fsdp.FSDPModule)


def test_number_of_ranks_is_refused_for_extensions():
    with fake_mesh((4, 2), ("dp", "tp")) as mesh:
        match = "'weight', a tensor with fsdp_pre_all_gather, got 2; pass one of these"
        _refused(_extension(), match, mesh=mesh["dp"], reshard_after_forward=2)
        fully_shard(_extension(), mesh=mesh["dp"], reshard_after_forward=4)  # as True


@pytest.mark.parametrize("number", [2, 8])
def test_number_of_ranks_of_dtensors_counts_those_of_its_own_axes(number):
    with fake_mesh((8, 2), ("dp", "tp")) as mesh:
        module = _dtensor(mesh["tp"])
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=number)
        (group,) = [g for g in module._get_fsdp_state().groups if g.params[0].name == "weight"]
        found = group.all_gather.post_forward_mesh
        if number == 8:  # as True
            assert found is None
        else:
            assert found.mesh.tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]


def test_number_of_ranks_must_divide_a_parameters_own_mesh():
    class Info:
        shard_mesh_dim, replicate_mesh_dim = 0, None

    class Result:
        placement = None
        mesh_info = Info()

    with fake_mesh((2, 4), ("a", "b")) as mesh:
        Info.mesh = mesh["a"]

        def place(param):
            return Result() if param.ndim == 1 else None

        _refused(nn.Linear(4, 8), "a factor of 2",
                 mesh=mesh["b"], reshard_after_forward=4, shard_placement_fn=place)  # fmt: skip


@pytest.mark.parametrize("granularity", [Rows(3), Whole()])
def test_granularity_that_chunks_of_an_extension_split_is_refused(granularity):
    def place(param):
        return granularity if param.ndim == 2 else None

    with fake_mesh((2,)):
        _refused(_extension(), r"None or Shard\(0\) for parameter 'weight', a Gathered",
                 shard_placement_fn=place)  # fmt: skip
        fully_shard(_extension(), shard_placement_fn=lambda param: Shard(0))
        fully_shard(
            _extension(), shard_placement_fn=lambda param: Rows(2) if param.ndim > 1 else None
        )


@pytest.mark.ranks
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
def test_gradients_are_divided_by_the_factor_of_their_reduction(reduce_dtype):
    """Gradients that were accumulated before the factor was set are divided by it, too."""

    def check():
        policy = fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        found = []
        for package in (fsdp, torch_fsdp):
            model = shard(package, stack(), mp_policy=policy)
            model.set_requires_gradient_sync(False)
            model(batch(0)).sum().backward()
            for module in model.modules():
                if isinstance(module, torch_fsdp.FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            model.set_requires_gradient_sync(True)
            model(batch(1)).sum().backward()
            found.append([param.grad.full_tensor() for param in model.parameters()])
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-2 if reduce_dtype else 1e-5, atol=1e-2)

    run_ranks(check, 2)


@pytest.mark.ranks
def test_divide_factor_is_refused_while_gradients_wait_for_their_all_reduce():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = shard(fsdp, stack(), mesh=mesh)
        model.set_requires_all_reduce(False)
        model(batch(0)).sum().backward()
        with pytest.raises(ValueError, match="wait for their all-reduce"):
            model[0].set_gradient_divide_factor(2.0)
        with pytest.raises(ValueError, match="wait for their all-reduce"):
            model[0].set_force_sum_reduction_for_comms(True)
        model.set_requires_all_reduce(True)
        model(batch(1)).sum().backward()
        model[0].set_gradient_divide_factor(2.0)

    run_ranks(check, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("method", "error"),
    [("set_is_last_backward", ValueError), ("set_manual_backward_finalization", RuntimeError)],
)
def test_settings_of_the_root_are_refused_below_it(method, error):
    def check():
        model = shard(fsdp, stack())
        getattr(model[1], method)(method != "set_is_last_backward")
        for _ in range(2):  # and again
            with CommLog() as log, pytest.raises(error, match=rf"{method}.* got '1'"):
                model(batch(0))
            log.assert_counts({})
        getattr(model, method)(method != "set_is_last_backward")
        model(batch(0))  # what holds for all

    run_ranks(check, 2)


@pytest.mark.ranks
def test_root_uses_the_largest_max_input_buffers_of_its_modules():
    def check():
        model = shard(fsdp, stack())
        model[1].set_reduce_scatter_max_input_buffers(2)
        seen = []

        def note(grad):
            states = [part._get_fsdp_state() for part in model[:3]]
            seen.append(
                sum(group.reduce_scatter.in_flight for one in states for group in one.groups)
            )

        model[0].down.register_forward_hook(
            lambda module, args, out: out.register_hook(note) and None
        )
        model(batch(0)).sum().backward()
        return seen

    assert run_ranks(check, 2) == [[2], [2]]


def test_streams_are_shared_after_a_forward():
    with fake_mesh((1,)):
        models = [shard(fsdp, stack()) for _ in range(2)]
        for model in models:
            model(torch.ones(1, 8))
        fsdp.share_comm_ctx(models)
        streams = {
            id(group.streams)
            for model in models
            for part in (*model[:3], model)
            for group in part._get_fsdp_state().groups
        }
        assert len(streams) == 1


def test_max_input_buffers_refuses_a_bool():
    with fake_mesh((1,)), pytest.raises(TypeError, match="must be an int"):
        fully_shard(nn.Linear(2, 2)).set_reduce_scatter_max_input_buffers(True)
