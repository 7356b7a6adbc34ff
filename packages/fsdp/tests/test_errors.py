"""Wrong input raises errors that name the parameter, what was expected, and the remedy."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fsdp import Block, Rows, fully_shard, share_comm_ctx
from fsdp._compat import default_reduce_dtype
from fsdp.mesh import checked_reshard
from testkit import fake_mesh, run_ranks

pytestmark = pytest.mark.ranks
REDUCED = default_reduce_dtype(torch.float32, torch.bfloat16)


def _model():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))


def _shard():
    model = _model()
    fully_shard(model[1])
    return fully_shard(model)


WRONG = {
    "a module list": (nn.ModuleList([nn.Linear(2, 2)]), {}, "do not implement forward"),
    "no module": ([], {}, "expected a module"),
    "a function in the list": ([torch.relu], {}, "expected a list of modules"),
    "a mesh that is none": (_model(), {"mesh": 2}, "expected a DeviceMesh"),
    "resharding to fewer": (
        _model(),
        {"reshard_after_forward": 2},
        "a factor of 1",
    ),
    "a policy that is none": (_model(), {"mp_policy": torch.bfloat16}, "MixedPrecisionPolicy"),
    "an offload that is none": (_model(), {"offload_policy": True}, "OffloadPolicy"),
    "zero rows": (_model(), {"shard_placement_fn": lambda p: Rows(0)}, r"n >= 1 .*'0.weight'"),
    "a number of rows": (
        _model(),
        {"shard_placement_fn": lambda p: 3},
        r"'0.weight', got 3",
    ),
    "columns": (
        _model(),
        {"shard_placement_fn": lambda p: Shard(1)},
        r"got Shard\(1\) .*'0.weight'",
    ),
    "columns from the end": (_model(), {"shard_placement_fn": lambda p: Shard(-1)}, "'0.weight'"),
    "a dim too far": (
        _model(),
        {"shard_placement_fn": lambda p: Shard(2)},
        r"'0.weight', whose sh",
    ),
    "a strategy that is none": (_model(), {"strategy": "fast"}, "expected one of .*'fast'"),
    "a list of ignored": (_model(), {"ignored_params": []}, "expected a set .*got list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_fully_shard_are_refused(what):
    module, options, message = WRONG[what]

    def check():
        params = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        with pytest.raises(ValueError, match=message):
            fully_shard(module, **options)
        if params:  # nothing has changed: the module can be sharded by a call that is right
            now = dict(module.named_parameters())
            assert all(now[name] is param for name, param in params.items())
            if not isinstance(module, nn.ModuleList):
                fully_shard(module)

    run_ranks(check, 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_shard_placement_result_is_refused_unless_it_shards_dim_0(dim):
    class Info:
        shard_mesh_dim, replicate_mesh_dim = 0, None

    class Result:
        mesh_info = Info()
        placement = Shard(dim)

    def check():
        Info.mesh = init_device_mesh("cpu", (2,))
        linear = nn.Linear(3, 12, bias=False)
        if dim == 1:
            with pytest.raises(ValueError, match=r"expected Shard\(0\), got .*'weight'"):
                fully_shard(linear, shard_placement_fn=lambda p: Result())
        else:
            fully_shard(linear, shard_placement_fn=lambda p: Result())
            assert linear.weight.to_local().shape == (6, 3)

    run_ranks(check, 2)


def test_granularity_with_a_float_is_refused():
    with pytest.raises(TypeError, match="integer"):
        Block(0.5)


def test_mesh_of_three_axes_is_refused():
    def check():
        mesh = init_device_mesh("cpu", (1, 1, 1))
        with pytest.raises(ValueError, match="3 axes"):
            fully_shard(_model(), mesh=mesh)

    run_ranks(check, 1)


def test_module_whose_parameters_are_all_sharded_already_is_accepted():
    def check():
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Tanh()))
        x = torch.ones(1, 2, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None

    run_ranks(check, 1)


def test_sharding_a_module_twice_is_refused():
    def check():
        with pytest.raises(AssertionError, match="has already been applied"):
            fully_shard(_shard())

    run_ranks(check, 1)


def test_torchs_fully_shard_refuses_a_sharded_module():
    def check():
        with pytest.raises(AssertionError, match="has already been applied"):
            torch.distributed.fsdp.fully_shard(_shard())

    run_ranks(check, 1)


def test_tied_parameters_in_two_calls_are_refused():
    def check():
        model = _model()
        model[0].weight = model[1][0].weight
        fully_shard(model[1])
        with pytest.raises(ValueError, match=r"'0.weight' is tied to '0.weight'"):
            fully_shard(model)

    run_ranks(check, 1)


def test_replaced_parameter_is_an_error_in_forward():
    def check():
        model = _shard()
        model(torch.ones(1, 4)).sum().backward()
        model[1][0].weight = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(RuntimeError, match=r"'1.0.weight' was replaced after fully_shard"):
            model(torch.ones(1, 4))

    run_ranks(check, 2)


def test_parameter_replaced_before_the_first_forward_is_an_error():
    def check():
        model = _shard()
        model[1][0].weight = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(RuntimeError, match=r"'1.0.weight' was replaced after fully_shard"):
            model(torch.ones(1, 4))

    run_ranks(check, 1)


def test_forward_with_meta_parameters_is_an_error():
    def check():
        with torch.device("meta"):
            model = _model()
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"'0.weight', '0.bias'.* on the meta device"):
            model(torch.ones(1, 4))

    run_ranks(check, 1)


def test_root_whose_submodule_ran_first_is_an_error():
    def check():
        model = _shard()
        model[1](torch.ones(1, 4))
        with pytest.raises(RuntimeError, match=r"'1' ran forward before"):
            model(torch.ones(1, 4))

    run_ranks(check, 1)


def test_optimizer_built_before_sharding_is_an_error_in_step():
    def check():
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fully_shard(model)
        with pytest.raises(
            RuntimeError, match=r"'0.weight'.*build the optimizer after fully_shard"
        ):
            optimizer.step()

    run_ranks(check, 1)


def _blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])


def _differently(model, kind):
    """Shards a model as other ranks do, except for one difference."""
    options = {}
    if kind == "granularity":
        options["shard_placement_fn"] = lambda param: Rows(2) if param.ndim == 2 else None
    if kind == "parameter":
        model[1][0].bias = None
    if kind == "dtype":
        model[1][0].bfloat16()
    if kind == "shape":
        model[1][0] = nn.Linear(4, 8)
    if kind == "shape of as many elements":
        model[1][0] = nn.Linear(2, 8, bias=False)
        model[1][0].bias = nn.Parameter(torch.ones(4))
    if kind == "frozen":
        model[1][0].bias.requires_grad_(False)
    if kind == "policy":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if kind == "resharding":
        options["reshard_after_forward"] = False
    if kind == "strategy":
        options["strategy"] = "native"
    if kind == "order":
        model[1][0].weight = model[1][0]._parameters.pop("weight")
    if kind == "fewer groups":
        fully_shard([model[0], model[1]])
    else:
        fully_shard(model[0], strategy=options.get("strategy", "auto"))
        if kind != "block":
            fully_shard(model[1], **options)
    return fully_shard(model)


DIFFERENCES = {
    "granularity": "block of '1.0.weight': 1 elements on rank 0, and 8 elements on rank 1",
    "parameter": "'1.0.bias' is in a buffer on rank 0, and in none on rank 1",
    "dtype": "dtype of '1.0.weight': torch.float32 on rank 0, and torch.bfloat16 on rank 1",
    "shape": "shape of '1.0.weight': (4, 4) on rank 0, and (8, 4) on rank 1",
    "shape of as many elements": "shape of '1.0.weight': (4, 4) on rank 0, and (8, 2) on rank 1",
    "frozen": "buffer of '1.0.weight': number 2, of '1.0.weight', '1.0.bias' on rank 0, and number "
    "2, of '1.0.weight' on rank 1",
    "policy": "options of buffer 2 ('1.0.weight', '1.0.bias'): gathered in torch.float32, reduced "
    "in torch.float32, trained, reshard_after_forward=True on rank 0, and gathered in "
    f"torch.bfloat16, reduced in {REDUCED}, trained, reshard_after_forward=True on rank 1",
    "resharding": "options of buffer 2 ('1.0.weight', '1.0.bias'): gathered in torch.float32, "
    "reduced in torch.float32, trained, reshard_after_forward=True on rank 0, and gathered in "
    "torch.float32, reduced in torch.float32, trained, reshard_after_forward=False on rank 1",
    "strategy": "plan of buffer 1 ('0.0.weight', '0.0.bias'): 2 shards of 12 elements, "
    "(Shard(dim=0),), full=False, Exchange on rank 0, and 2 shards of 12 elements, "
    "(Shard(dim=0),), full=False, Native on rank 1",
    "order": "buffer of '1.0.weight': number 2, of '1.0.weight', '1.0.bias' on rank 0, and number "
    "2, of '1.0.bias', '1.0.weight' on rank 1",
    "block": "buffer of '2.0.weight': number 0, of '2.0.weight', '2.0.bias' on rank 0, and number "
    "0, of '1.0.weight', '1.0.bias', '2.0.weight', '2.0.bias' on rank 1",
    "fewer groups": "buffer of '0.0.weight': number 1, of '0.0.weight', '0.0.bias' on rank 0, and "
    "number 1, of '0.0.weight', '0.0.bias', '1.0.weight', '1.0.bias' on rank 1",
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_plans_that_differ_between_ranks_are_an_error_on_all_ranks(kind):
    def check():
        model = _differently(_blocks(), kind if dist.get_rank() == 1 else "nothing")
        with pytest.raises(ValueError, match="ranks differ") as caught:
            model(torch.ones(1, 4))
        return str(caught.value)

    wanted = f"verify: ranks differ: {DIFFERENCES[kind]}; shard the same, in the same order, on"
    for message in run_ranks(check, 2):
        assert message.startswith(wanted)


def test_hsdp_replicas_with_different_plans_are_an_error():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        rows = Rows(1 + dist.get_rank())
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: rows)
        message = "block of '0.weight': 4 elements on rank 0, and 8 elements on rank 1"
        with pytest.raises(ValueError, match=f"^verify: ranks differ: {message};"):
            model(torch.ones(1, 4))

    run_ranks(check, 2)


def test_wrong_arguments_of_fsdp_module_methods_are_refused():
    def check():
        model = _shard()
        for call, message in (
            (lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]), "FSDPModule"),
            (lambda: model.set_reshard_after_forward(2), "should be a bool"),
            (lambda: model.set_gradient_divide_factor(0), "positive"),
            (lambda: model.set_reduce_scatter_max_input_buffers(0), "a positive int"),
            (lambda: share_comm_ctx([nn.Linear(1, 1)]), "FSDPModules"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        model(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="on the root"):
            model[1].reset_iter_state()

    run_ranks(check, 1)


def test_sizes_accept_numpy_integers():
    assert Rows(np.int64(8)) == Rows(8)
    assert (type(Rows(np.int64(8)).n), type(Block(np.int64(8)).n)) == (int, int)
    for kind in (Rows, Block):
        with pytest.raises(TypeError, match="integer"):
            kind(2.0)
    with fake_mesh((4,)) as mesh:
        model = fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=np.int64(2))
        model.set_reduce_scatter_max_input_buffers(np.int64(3))
        with pytest.raises(TypeError, match="must be an int"):
            model.set_reduce_scatter_max_input_buffers(3.0)
    for wrong in (2.0, np.int64(3)):
        with pytest.raises(ValueError, match="a factor of 4"):
            checked_reshard(wrong, 4)
    assert checked_reshard(np.int64(2), 4) == (True, 2)
    assert checked_reshard(True, 4) == (True, None)  # which is no number here
    assert checked_reshard(False, 4) == (False, None)
