"""AdamW on the buffers of groups has the bits and the state dicts of torch's, in few tensors."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp
from fsdp import Rows
from fsdp.optim import AdamW
from testkit import CommLog, run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.residual_stack import batch, shard, stack

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
with_dcp = pytest.mark.filterwarnings("ignore")  # of DCP itself


def torch_adamw(params, **options):
    return torch.optim.AdamW(params, fused=True, **OPTIONS | options)


def flat_adamw(params, **options):
    return AdamW(params, **OPTIONS | options)


def decays(model):
    """Returns two parameter groups, as is usual: without weight decay what is no matrix."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def train(model, optimizer, steps, without=lambda step: ()):
    """Steps on batches of this rank; `without` names parameters without a gradient in a step."""
    for step in steps:
        model(batch(step)).square().mean().backward()
        for name in without(step):
            model.get_parameter(name).grad = None
        optimizer.step()
        optimizer.zero_grad()


def tensors(model, optimizer):
    """Returns the local tensors of parameters and their state, by name."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in found.items()}


def assert_same(model, optimizer, other, another):
    expected = tensors(other, another)
    found = tensors(model, optimizer)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def kernel_calls(optimizer):
    """Steps, and returns how many tensors each call of torch's kernel had."""
    with mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as kernel:
        optimizer.step()
    return [len(call.args[0]) for call in kernel.call_args_list]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "maximize": True, "eps": 0.0}], ids=["default", "amsgrad"]
)
def test_sharded_parameters_have_torchs_bits_in_few_tensors(options):
    def check():
        for granularity in (None, Rows(8)):
            pair = []
            for make in (torch_adamw, flat_adamw):
                model = stack()
                model[1].norm.weight.requires_grad_(False)
                shard(fsdp, model, shard_placement_fn=lambda param: granularity)  # noqa: B023
                optimizer = make(decays(model), **options)
                train(model, optimizer, range(5))
                pair += [model, optimizer]
            assert_same(*pair[2:], *pair[:2])
            model, optimizer = pair[2:]
            model(batch(5)).square().mean().backward()
            with CommLog() as log:
                calls = kernel_calls(optimizer)
            log.assert_counts({})
            trained = sum(param.requires_grad for param in model.parameters())
            # Matrices have 128 elements: the two of a block follow each other.
            assert len(calls) == 2
            assert sum(calls) < trained

    run_ranks(check, 2)


@pytest.mark.ranks
def test_a_group_whose_sizes_are_multiples_is_one_tensor():
    def check():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
        fsdp.fully_shard(model)
        optimizer = flat_adamw(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 32)).square().mean().backward()
            assert kernel_calls(optimizer) == [1]
        # As asynchronous checkpoints copy the state, whose tensors are views at some offset.
        state = optimizer.state_dict()["state"]
        for copied, own in zip(copy.deepcopy(state).values(), state.values(), strict=True):
            assert torch.equal(copied["exp_avg"].to_local(), own["exp_avg"].to_local())

    run_ranks(check, 2)


@pytest.mark.ranks
def test_parameters_without_gradients_keep_their_own_step_counts():
    """Some get their first gradient late, others none in some steps."""
    late, pauses = "0.up.weight", "1.down.weight"

    def without(step):
        return [name for name, skip in ((late, step < 2), (pauses, step == 3)) if skip]

    def check():
        pair = []
        for make in (torch_adamw, flat_adamw):
            model = shard(fsdp, stack())
            optimizer = make(model.parameters())
            train(model, optimizer, range(6), without)
            pair += [model, optimizer]
        assert_same(*pair[2:], *pair[:2])
        steps = {n: pair[3].state[p]["step"].item() for n, p in pair[2].named_parameters()}
        assert (steps[late], steps[pauses], steps["1.up.weight"]) == (4, 5, 6)

    run_ranks(check, 2)


@pytest.mark.ranks
def test_tensor_parallel_and_plain_parameters_in_one_parameter_group():
    """torch's refuses them together, so each has a parameter group of its own there."""

    def model_of(mesh):
        model = stack()
        for block in list(model)[:2]:
            for layer, dim in ((block.up, 0), (block.down, 1)):
                at = distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(dim)])
                layer.weight = nn.Parameter(at)
            fsdp.fully_shard(block, mesh=mesh["dp"])
        return model

    def set_grads(model, step):
        torch.manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape)
            if isinstance(param, DTensor):  # as backward might leave it
                grad = distribute_tensor(
                    grad, param.device_mesh, [Replicate()] * param.device_mesh.ndim
                )
                grad = grad if step == 1 else grad.redistribute(placements=param.placements)
            param.grad = grad

    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model, other = model_of(mesh), model_of(mesh)
        params = list(other.parameters())
        kinds = {}
        for param in params:
            kinds.setdefault(getattr(param, "device_mesh", None), []).append(param)
        optimizer, another = (
            flat_adamw(model.parameters()),
            torch_adamw([{"params": p} for p in kinds.values()]),
        )
        for step in range(3):
            for one, own in ((model, optimizer), (other, another)):
                set_grads(one, step)
                own.step()
        assert len(kinds) == 3
        assert_same(model, optimizer, other, another)

    run_ranks(check, 2)


@pytest.mark.ranks
def test_state_dicts_are_torchs_and_load_both_ways():
    def check():
        made = []
        for make in (torch_adamw, flat_adamw):
            model = shard(fsdp, stack())
            optimizer = make(decays(model))
            train(model, optimizer, range(3))
            made.append((model, optimizer, copy.deepcopy(optimizer.state_dict())))
        of_torch, of_flat = (state for _, _, state in made)
        assert of_flat["param_groups"] == of_torch["param_groups"]
        foreach = copy.deepcopy(of_torch)  # of the default implementation
        for group in foreach["param_groups"]:
            group.update(fused=None, foreach=True)
        for make, state in ((torch_adamw, of_flat), (flat_adamw, of_torch), (flat_adamw, foreach)):
            model = shard(fsdp, stack())
            model.load_state_dict(made[0][0].state_dict())
            optimizer = make(decays(model))
            optimizer.load_state_dict(copy.deepcopy(state))
            train(model, optimizer, range(3, 6))
            if make is flat_adamw:
                assert optimizer.param_groups[0]["fused"]
                assert not optimizer.param_groups[0]["foreach"]
                model(batch(6)).square().mean().backward()
                assert sum(kernel_calls(optimizer)) < len(list(model.parameters()))
            else:
                expected = {key: value.clone() for key, value in tensors(model, optimizer).items()}
        model, optimizer, _ = made[1]
        train(model, optimizer, range(3, 6))
        found = tensors(model, optimizer)
        assert all(torch.equal(found[key], value) for key, value in expected.items())

    run_ranks(check, 2)


@pytest.mark.ranks
@with_dcp
@pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checkpoints_load_at_another_granularity_and_in_torchs(tmp_path, flat):
    def check():
        model = shard(fsdp, stack())
        optimizer = flat_adamw(model.parameters())
        train(model, optimizer, range(3))
        save_checkpoint(tmp_path / "c", model, optimizer, flat=flat)
        train(model, optimizer, range(3, 6))
        expected = [param.full_tensor() for param in model.parameters()]
        for make, package in ((flat_adamw, fsdp), (torch_adamw, fsdp), (flat_adamw, torch_fsdp)):
            rows = {"shard_placement_fn": lambda p: Rows(4)} if package is fsdp else {}
            other = shard(package, stack(), **rows)
            another = make(other.parameters())
            load_checkpoint(tmp_path / "c", other, another, flat=flat)
            train(other, another, range(3, 6))
            for param, value in zip(other.parameters(), expected, strict=True):
                torch.testing.assert_close(param.full_tensor(), value, rtol=1e-6, atol=1e-7)

    run_ranks(check, 2, timeout=120)


@pytest.mark.ranks
def test_state_of_another_sharding_is_refused_by_name():
    def check():
        made = []
        for granularity in (None, Rows(16)):
            model = shard(fsdp, stack(), shard_placement_fn=lambda param: granularity)  # noqa: B023
            optimizer = flat_adamw(model.named_parameters())
            train(model, optimizer, range(1))
            made.append((model, optimizer))
        before = {key: value.clone() for key, value in tensors(*made[1]).items()}
        with pytest.raises(ValueError, match=r"AdamW: exp_avg.* of parameter .*reshards it"):
            made[1][1].load_state_dict(made[0][1].state_dict())
        after = tensors(*made[1])
        assert all(torch.equal(after[key], value) for key, value in before.items())
        model, optimizer = made[0]
        model[0].up.weight.grad = torch.ones(16, 8)
        with pytest.raises(
            ValueError, match=r"expected parameter '0\.up\.weight' and its gradient"
        ):
            optimizer.step()

    run_ranks(check, 2)


@pytest.mark.ranks
def test_autograd_sees_that_parameters_have_changed():
    def check():
        model = shard(fsdp, stack())
        optimizer = flat_adamw(model.parameters())
        before = [(p, p._version, p._local_tensor._version) for p in model.parameters()]
        train(model, optimizer, range(1))
        for param, version, local in before:
            assert param._version > version
            assert param._local_tensor._version > local

    run_ranks(check, 2)


@pytest.mark.ranks
def test_a_scaler_that_found_inf_skips_the_step():
    def check():
        for found, scale in ((1.0, 1.0), (0.0, 4.0)):
            pair = []
            for make in (torch_adamw, flat_adamw):
                model = shard(fsdp, stack())
                optimizer = make(model.parameters())
                train(model, optimizer, range(1))
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found)
                train(model, optimizer, range(1, 2))
                pair += [model, optimizer]
            assert_same(*pair[2:], *pair[:2])
            steps = {pair[3].state[param]["step"].item() for param in pair[2].parameters()}
            assert steps == {2.0 - found}

    run_ranks(check, 2)


def test_step_counts_that_a_user_writes_count():
    """Plain parameters that share a storage are a run, too."""

    def trained(make):
        torch.manual_seed(0)
        memory = torch.randn(64)
        params = [nn.Parameter(part) for part in memory.split(32)]
        optimizer = make(params)
        for step in range(4):
            for param, grad in zip(params, (memory * step).split(32), strict=True):
                param.grad = grad
            if step == 2:
                optimizer.state[params[1]]["step"].fill_(50.0)
            optimizer.step()
        return [*params, *(optimizer.state[param]["step"] for param in params)]

    for found, expected in zip(trained(flat_adamw), trained(torch_adamw), strict=True):
        assert torch.equal(found, expected)
    assert [found.item() for found in trained(flat_adamw)[2:]] == [4, 52]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_length_has_torchs_bits(dtype):
    """The kernel rounds what is left over after the last full vector in another way."""

    def trained(make):
        torch.manual_seed(0)
        sizes = [*range(1, 40), 64, 0, 100]
        memory = torch.randn(sum(sizes), dtype=dtype)
        grads = torch.randn(2, sum(sizes), dtype=dtype)
        params = [nn.Parameter(part) for part in memory.split(sizes)]
        optimizer = make(params)
        for grad in grads:
            for param, part in zip(params, grad.split(sizes), strict=True):
                param.grad = part
            optimizer.step()
        return memory, [optimizer.state[param]["exp_avg"] for param in params]

    found, expected = trained(flat_adamw), trained(torch_adamw)
    assert torch.equal(found[0], expected[0])
    for actual, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"fused": None}], ids=["not fused", "torch's default"]
)
def test_other_implementations_are_refused(options):
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"expected fused=True, got fused="):
        AdamW(params, **options)
    optimizer = AdamW(params)
    with pytest.raises(ValueError, match="got foreach=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "foreach": True})
    assert len(optimizer.param_groups) == 1
