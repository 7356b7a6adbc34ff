"""SOAP computes the bits of one device on any ranks; its state is on owners only."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import SOAP
from fsdp.optim.tensors import local_of
from testkit import run_ranks
from testkit.models.matrix_net import (
    MatrixNet,
    full_tensor,
    full_tensors,
    matrices_of,
    optimizer_of,
    same_bits,
    sharded,
    train,
)
from testkit.models.reference_soap import ReferenceSoap, ReferenceSoapAndAdamW

GRANULARITIES = {"elements": Block(1), "rows": Rows(3), "whole": Whole()}
SIZE = 13  # of blocks: 37 x 13 has three, of two shapes


def bytes_of(optimizer, params):
    """Returns the bytes of this rank's state of parameters, without the step counts."""
    return sum(
        local_of(value).nbytes
        for param in params
        for key, value in optimizer.state[param].items()
        if key != "step"
    )


@cache
def single_device():
    """Returns losses, parameters and bytes of state on one device."""
    model = MatrixNet()
    plain = ReferenceSoapAndAdamW(model, block_size=SIZE)
    return train(model, plain), full_tensors(model), plain.soap.state_bytes


@pytest.mark.ranks
@pytest.mark.parametrize(
    "granularity",
    ["elements", *(pytest.param(one, marks=pytest.mark.slow) for one in ("whole", "rows"))],
)
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_fifty_steps_have_the_bits_and_the_memory_of_one_device(ranks, granularity):
    def check():
        model = sharded(fully_shard, GRANULARITIES[granularity])
        optimizer = optimizer_of(SOAP, model, block_size=SIZE)
        losses = train(model, optimizer)
        nbytes = bytes_of(optimizer, [param for _, param in matrices_of(model)])
        return losses, full_tensors(model), nbytes

    expected, expected_params, state_bytes = single_device()
    found = run_ranks(check, ranks)
    for losses, params, nbytes in found:
        assert losses == expected
        assert same_bits(params, expected_params) == []
        assert nbytes < state_bytes or ranks == 1
    assert sum(nbytes for _, _, nbytes in found) == state_bytes
    assert expected[-1] < expected[0] / 50


OPTIONS = [
    {"betas": (0.9, 0.99), "weight_decay": 0.3},
    {"eps": 0.1, "precondition_frequency": 3},
    {"precondition_frequency": 1, "block_size": 5},
    {"block_size": 3},
    {"block_size": 1000},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: ",".join(one))
def test_options_have_the_bits_of_the_reference_on_plain_parameters(options):
    model, reference = MatrixNet(), MatrixNet()
    losses = train(model, optimizer_of(SOAP, model, **options), 12)
    assert losses == train(reference, ReferenceSoapAndAdamW(reference, **options), 12)
    assert same_bits(full_tensors(model), full_tensors(reference)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_do_not_depend_on_the_alignment_of_gradients(dtype):
    """MKL's product of a matrix with itself depends on it on some CPUs (AMD's with AVX-512)."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(4, 11 * 13, dtype=dtype, generator=generator)
    params = [nn.Parameter(torch.zeros(11, 13, dtype=dtype)) for _ in range(4)]
    optimizer = SOAP(params)
    for grad in grads:
        for begin, param in enumerate(params):
            memory = torch.zeros(begin + grad.numel(), dtype=dtype)
            param.grad = memory[begin:].copy_(grad).view(11, 13)
        optimizer.step()
    assert params[0].any()
    for param in params[1:]:
        assert torch.equal(param, params[0])


def test_rotating_the_weights_rotates_the_training():
    """Adam does not have this property, and SOAP has it only if blocks are whole matrices."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs, target, start = draw(30, 6) * torch.arange(1, 7), draw(30, 6), draw(6, 6)
    left, right = (torch.linalg.qr(draw(6, 6)).Q for _ in range(2))

    def weights(kind, turned, **options):
        weight = nn.Parameter(left.T @ start @ right if turned else start.clone())
        optimizer = kind([weight], lr=0.05, **options)
        for _ in range(25):
            turn = left @ weight @ right.T if turned else weight
            (inputs @ turn - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return left @ weight @ right.T if turned else weight

    torch.testing.assert_close(weights(SOAP, True), weights(SOAP, False), rtol=1e-6, atol=1e-6)
    for kind, options in [(torch.optim.AdamW, {}), (SOAP, {"block_size": 3})]:
        assert (weights(kind, True, **options) - weights(kind, False, **options)).norm() > 0.1


def test_learning_rate_may_be_a_tensor_and_have_a_scheduler():
    model, reference = MatrixNet(), MatrixNet()
    optimizer = optimizer_of(SOAP, model, lr=torch.tensor(0.02, dtype=torch.float64))
    assert train(model, optimizer, 4) == train(reference, ReferenceSoapAndAdamW(reference), 4)
    other_model = MatrixNet()
    other_optimizer = optimizer_of(SOAP, other_model)
    schedule = torch.optim.lr_scheduler.LambdaLR(other_optimizer, [lambda n: 0.0, lambda n: 0.0])
    before = full_tensors(other_model)
    train(other_model, other_optimizer, 3)
    assert same_bits(full_tensors(other_model), before) == []
    assert schedule.get_last_lr() == [0.0, 0.0]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_bfloat16_and_float64_have_the_bits_of_the_reference(dtype):
    """State is float32 or wider; gradients and updates are sent in the parameter's dtype."""

    def check():
        model = fully_shard(MatrixNet().to(dtype))
        optimizer = optimizer_of(SOAP, model, block_size=SIZE, precondition_frequency=3)
        losses = train(model, optimizer, 8)
        return losses, optimizer.state[model.up.weight]["left.0"].dtype

    single = MatrixNet().to(dtype)
    reference = ReferenceSoapAndAdamW(single, block_size=SIZE, precondition_frequency=3)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert run_ranks(check, 2) == [(train(single, reference, 8), state_dtype)] * 2


class Stacks(nn.Module):
    """Five experts in one parameter, and a fused QKV."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(5, 6, 7))
        self.qkv = nn.Parameter(torch.randn(12, 5))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_and_heads_are_separate_matrices(ranks):
    def check():
        model = Stacks()
        heads = [one.clone() for one in model.qkv.detach().split(4)]
        params = [nn.Parameter(one) for one in [*model.experts.detach().clone(), *heads]]
        fully_shard(model)
        groups = [
            {"params": [("experts", model.experts)]}, {"params": [("qkv", model.qkv)], "split": 3}
        ]  # fmt: skip
        optimizer = SOAP(groups, lr=0.1, block_size=4, precondition_frequency=2)
        reference = ReferenceSoap(params, lr=0.1, block_size=4, precondition_frequency=2)
        for step in range(5):
            torch.manual_seed(step)
            grads = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
            for name, param in model.named_parameters():
                param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements)
            for param, grad in zip(
                params, [*grads["experts"], *grads["qkv"].split(4)], strict=True
            ):
                param.grad = grad
            optimizer.step()
            reference.step()
        assert torch.equal(full_tensor(model.experts), torch.stack(params[:5]))
        assert torch.equal(full_tensor(model.qkv), torch.cat(params[5:]))
        return optimizer.owners()

    owners = run_ranks(check, ranks)
    assert all(one == owners[0] for one in owners)
    assert len(owners[0]) == 5 * 2 + 3
    assert set(owners[0].values()) == set(range(ranks))
    assert {"experts[4][0:4]", "experts[4][4:6]", "qkv[2]"} <= owners[0].keys()


def steps_of(model, optimizer, inputs, steps=4, **options):
    """Steps both optimizers with the same gradients; returns the names of matrices that differ."""
    matrices = {name: nn.Parameter(full_tensor(param)) for name, param in matrices_of(model)}
    reference = ReferenceSoap(matrices.values(), **options)
    for step in range(steps):
        model(inputs(step)).sum().backward()
        for name, param in matrices_of(model):
            matrices[name].grad = None if param.grad is None else full_tensor(param.grad)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    return same_bits(full_tensors(model), matrices)


def ids(step):
    return torch.randint(0, 11, (4, 6))


OFTEN = {"block_size": 8, "precondition_frequency": 2}


@pytest.mark.ranks
def test_hsdp_computes_on_matrices_within_the_shard_axis():
    def check():
        model = sharded(fully_shard, mesh=init_device_mesh("cpu", (2, 2)))
        torch.manual_seed(dist.get_rank())
        assert steps_of(model, optimizer_of(SOAP, model, **OFTEN), ids, **OFTEN) == []

    run_ranks(check, 4)


@pytest.mark.ranks
def test_parameters_of_fsdp2_are_optimized_too():
    def check():
        model = torch_fully_shard(MatrixNet())
        torch.manual_seed(dist.get_rank())
        assert steps_of(model, optimizer_of(SOAP, model, **OFTEN), ids, **OFTEN) == []

    run_ranks(check, 3)


@pytest.mark.ranks
def test_frozen_and_unused_matrices_are_unchanged_and_ranks_may_own_nothing():
    def check():
        model = MatrixNet()
        model.down.requires_grad_(False)
        model.unused = nn.Linear(5, 5)
        fully_shard(model)
        before = full_tensors(model)
        optimizer = optimizer_of(SOAP, model, precondition_frequency=2)
        assert steps_of(model, optimizer, ids, precondition_frequency=2) == []
        same = [
            name for name, value in full_tensors(model).items() if torch.equal(value, before[name])
        ]
        assert same == ["down.weight", "down.bias", "unused.weight", "unused.bias"]
        assert not optimizer.state[model.unused.weight]
        used = [model.up.weight, model.square.weight]
        return optimizer.owners(), bytes_of(optimizer, used)

    found = run_ranks(check, 4)  # two matrices, four ranks
    for owners, _ in found:
        assert set(owners) == {"up.weight", "square.weight"}
    assert sum(nbytes == 0 for _, nbytes in found) >= 2


@pytest.mark.ranks
def test_owners_do_not_change_when_parameters_are_added_or_have_no_gradient():
    def check():
        model = sharded(fully_shard)
        groups = [(name, param) for name, param in matrices_of(model)]
        optimizer = SOAP(groups[:1], block_size=SIZE)
        first = step_with(optimizer, groups[:1])
        optimizer.add_param_group({"params": groups[1:]})
        everything = step_with(optimizer, groups)
        assert first.items() <= everything.items()
        assert step_with(optimizer, groups[1:]).items() <= everything.items()
        assert step_with(optimizer, groups) == everything
        return everything

    found = run_ranks(check, 4)
    assert found == [found[0]] * 4
    assert set(found[0].values()) == set(range(4))


def step_with(optimizer, named):
    """Steps with gradients of these parameters only; returns the owners."""
    optimizer.zero_grad()
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.owners()
