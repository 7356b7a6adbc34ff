"""Muon computes the bits of torch's Muon at any number of ranks and any granularity."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import Muon
from fsdp.optim.muon.newton_schulz import adjusted_lr
from fsdp.optim.tensors import subtract_
from testkit import run_ranks
from testkit.models.matrix_net import (
    MatrixMlp,
    MatrixNet,
    TorchMuon,
    full_tensor,
    full_tensors,
    matrices_of,
    optimizer_of,
    same_bits,
    sharded,
    train,
)

GRANULARITIES = {"elements": Block(1), "rows": Rows(3), "whole": Whole()}
# Shards that cut matrices anywhere, and none; those of rows are gathered as those of elements.
ONE_OF_EACH = ["elements", "whole", pytest.param("rows", marks=pytest.mark.slow)]


@pytest.mark.ranks
@pytest.mark.parametrize("granularity", ONE_OF_EACH)
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_fifty_steps_have_the_bits_of_torchs_muon(ranks, granularity):
    def check():
        model, reference = sharded(fully_shard, GRANULARITIES[granularity]), MatrixNet()
        losses = train(model, optimizer_of(Muon, model)), train(reference, TorchMuon(reference))
        return losses, same_bits(full_tensors(model), full_tensors(reference))

    for (losses, expected), differing in run_ranks(check, ranks):
        assert losses == expected
        assert losses[-1] < losses[0]
        assert differing == []


OPTIONS = [
    {"nesterov": False},
    {"momentum": 0.5, "weight_decay": 0.0, "ns_steps": 3},
    {"adjust_lr_fn": "match_rms_adamw", "eps": 10.0},
    {"ns_coefficients": (2.0, -1.5, 0.5)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: ",".join(one))
def test_options_have_the_effect_of_torchs_on_plain_parameters(options):
    model, reference = MatrixNet(), MatrixNet()
    losses = train(model, optimizer_of(Muon, model, **options), 5)
    assert losses == train(reference, TorchMuon(reference, **options), 5)
    assert same_bits(full_tensors(model), full_tensors(reference)) == []


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 7), (24, 24), (96, 7)], ids=str)
def test_learning_rate_of_a_matrix_has_the_bits_of_torchs(adjust_lr_fn, shape):
    """In float64, where a product in another order would have other bits."""
    torch.manual_seed(0)
    start, grad = torch.randn(2, *shape, dtype=torch.float64)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    kinds = [Muon, torch.optim.Muon]
    for lr in (0.02, 0.013, 0.3):
        for param, kind in zip(params, kinds, strict=True):
            param.grad = grad
            kind([param], lr=lr, weight_decay=0.0, adjust_lr_fn=adjust_lr_fn).step()
    assert torch.equal(*params)
    jordan, moonlight = max(1, shape[0] / shape[1]) ** 0.5, 0.2 * max(shape) ** 0.5
    expected = moonlight if adjust_lr_fn == "match_rms_adamw" else jordan
    assert adjusted_lr(1.0, adjust_lr_fn, shape) == pytest.approx(expected, rel=1e-15)


def test_learning_rate_may_be_a_tensor():
    model, reference = MatrixNet(), MatrixNet()
    optimizer = optimizer_of(Muon, model, lr=torch.tensor(0.02, dtype=torch.float64))
    assert train(model, optimizer, 3) == train(reference, TorchMuon(reference), 3)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_bfloat16_and_float64_have_the_same_bits_on_any_ranks(dtype):
    """torch rounds bfloat16 updates twice in elements that fill no vector of the CPU."""

    def check():
        model = fully_shard(MatrixNet().to(dtype))
        return train(model, optimizer_of(Muon, model), 8)

    single, reference = MatrixNet().to(dtype), MatrixNet().to(dtype)
    expected = train(single, optimizer_of(Muon, single), 8)
    assert run_ranks(check, 2) == [expected] * 2
    tolerance = {torch.bfloat16: 0.05, torch.float64: 0.0}[dtype]
    assert train(reference, TorchMuon(reference), 8) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_subtracting_an_update_does_not_depend_on_shards(dtype):
    generator = torch.Generator().manual_seed(0)
    start, update = torch.randn(2, 4810, generator=generator).to(dtype)
    full, shards = start.clone(), start.clone()
    subtract_(full, update, 0.02)
    for part, own in zip(shards.split(13), update.split(13), strict=True):
        subtract_(part, own, 0.02)
    assert torch.equal(shards, full)
    torch.testing.assert_close(full, (start.double() - 0.02 * update.double()).to(dtype))


def test_scheduler_changes_the_learning_rate_of_matrices_and_other_parameters():
    model, reference = MatrixNet(), MatrixNet()
    optimizer, references = optimizer_of(Muon, model), TorchMuon(reference)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, *references.both)
    ]
    for step in range(4):
        assert train(model, optimizer, 1, step) == train(reference, references, 1, step)
        for schedule in schedules:
            schedule.step()


class Stacks(nn.Module):
    """Five experts in one parameter, a fused QKV, and a projection with unequal heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(5, 6, 7))
        self.qkv, self.gqa = nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.randn(9, 4))

    def forward(self, x):
        y = torch.tanh(torch.einsum("bi,eij->bj", x, self.experts))
        return (y[:, :5] @ self.qkv.T).square().mean() + (x[:, :4] @ self.gqa.T).square().mean()


SPLITS = {"experts": None, "qkv": 3, "gqa": lambda param: (5, 2, 2)}
ROWS = {"qkv": (4, 4, 4), "gqa": (5, 2, 2)}


def apart(stacks):
    """Returns each matrix as a separate parameter."""
    found = list(stacks.experts.detach().clone())
    for name, rows in ROWS.items():
        found += [one.clone() for one in getattr(stacks, name).detach().split(rows)]
    return [nn.Parameter(one) for one in found]


def stack_muon(model, splits):
    if splits == "patterns":
        return Muon(model.named_parameters(), lr=0.1, split={"q.v": 3, ".*a": SPLITS["gqa"]})
    groups = [
        {"params": [(name, param)], "split": SPLITS[name]}
        for name, param in model.named_parameters()
    ]
    return Muon(groups, lr=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize("splits", ["groups", "patterns"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_heads_and_projections_are_separate_matrices(ranks, splits):
    def check():
        model = Stacks()
        fully_shard(model)
        params = apart(Stacks())
        optimizer, reference = stack_muon(model, splits), torch.optim.Muon(params, lr=0.1)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(3, 6)).backward()
            with torch.no_grad():
                parts = list(full_tensor(model.experts.grad))
                for name, rows in ROWS.items():
                    parts += full_tensor(getattr(model, name).grad).split(rows)
            for param, grad in zip(params, parts, strict=True):
                param.grad = grad.contiguous()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
        got = Stacks()
        for name, param in model.named_parameters():
            getattr(got, name).data = full_tensor(param)
        assert all(torch.equal(a, b) for a, b in zip(apart(got), params, strict=True))
        return optimizer.owners()

    owners = run_ranks(check, ranks)
    assert all(one == owners[0] for one in owners)
    assert len(owners[0]) == 5 + 3 + 3
    assert {owners[0][f"experts[{n}]"] for n in range(5)} == set(range(ranks))


def steps_of(model, optimizer, inputs, steps=3):
    """Steps both optimizers with the same gradients; returns the names of matrices that differ."""
    matrices = {name: nn.Parameter(full_tensor(param)) for name, param in matrices_of(model)}
    reference = torch.optim.Muon(matrices.values(), lr=0.02)
    for step in range(steps):
        model(inputs(step)).sum().backward()
        for name, param in matrices_of(model):
            matrices[name].grad = None if param.grad is None else full_tensor(param.grad)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    return same_bits(full_tensors(model), matrices)


@pytest.mark.ranks
def test_hsdp_gathers_matrices_within_the_shard_axis():
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        model = sharded(fully_shard, mesh=mesh)
        torch.manual_seed(dist.get_rank())
        assert (
            steps_of(model, optimizer_of(Muon, model), lambda step: torch.randint(0, 11, (4, 6)))
            == []
        )

    run_ranks(check, 4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "granularity",
    ["elements", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rows", "whole"))],
)
def test_hsdp_computes_each_matrix_once_in_a_shard_group_with_the_bits_of_one_device(granularity):
    def check():
        calls = []

        def counted(graph, inputs):  # a backend of torch.compile
            return lambda *args: calls.append(args[0].shape) or graph(*args)

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(fully_shard, GRANULARITIES[granularity], mesh=mesh)
        losses = train(model, optimizer_of(Muon, model, compile_backend=counted), 4)
        return losses, len(calls), full_tensors(model)

    reference = MatrixNet()
    expected, params = train(reference, TorchMuon(reference), 4), full_tensors(reference)
    found = run_ranks(check, 4)
    for losses, _, actual in found:
        assert losses == expected
        assert same_bits(actual, params) == []
    calls = [count for _, count, _ in found]
    assert calls[:2] == calls[2:]  # of two replicas
    assert sum(calls[:2]) == 4 * len(matrices_of(reference))


@pytest.mark.ranks
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp and tp", "tp only"])
def test_tensor_parallel_matrices_are_gathered_before_the_iteration(fsdp):
    def check():
        shape = (2, 2) if fsdp else (1, 4)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = MatrixMlp()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fsdp:
            fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(mesh.get_local_rank("dp"))
        assert steps_of(model, optimizer_of(Muon, model), lambda step: torch.randn(5, 6)) == []

    run_ranks(check, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stacked_experts_with_expert_and_tensor_parallelism(dim):
    """Sharded along dim 0 each rank has whole experts; along other dims a shard of each."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = nn.Module()
        values = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
        model.experts = nn.Parameter(distribute_tensor(values, mesh["ep"], [Shard(dim)]))
        fully_shard(model, mesh=mesh["dp"])
        optimizer = Muon(model.named_parameters(), lr=0.1)
        matrices = [nn.Parameter(one) for one in values.clone()]
        reference = torch.optim.Muon(matrices, lr=0.1)
        for _ in range(2):
            model.experts.grad = torch.zeros_like(model.experts)
            torch.manual_seed(dist.get_rank())
            model.experts.grad.to_local().normal_()
            for param, grad in zip(matrices, full_tensor(model.experts.grad), strict=True):
                param.grad = grad.contiguous()
            optimizer.step()
            reference.step()
        assert torch.equal(full_tensor(model.experts), torch.stack(list(matrices)))
        return optimizer.owners()

    for owners in run_ranks(check, 4):
        assert len(owners) == (2 if dim == 0 else 4)


@pytest.mark.ranks
def test_parameters_of_fsdp2_are_optimized_too():
    def check():
        model = torch_fully_shard(MatrixNet())
        torch.manual_seed(dist.get_rank())
        assert (
            steps_of(model, optimizer_of(Muon, model), lambda step: torch.randint(0, 11, (4, 6)))
            == []
        )

    run_ranks(check, 3)


@pytest.mark.ranks
def test_frozen_and_unused_matrices_are_unchanged_and_ranks_may_own_nothing():
    def check():
        model = MatrixNet()
        model.down.requires_grad_(False)
        model.unused = nn.Linear(5, 5)
        fully_shard(model)
        before = full_tensors(model)
        optimizer = optimizer_of(Muon, model)
        assert steps_of(model, optimizer, lambda step: torch.randint(0, 11, (4, 6))) == []
        same = [
            name for name, value in full_tensors(model).items() if torch.equal(value, before[name])
        ]
        assert same == ["down.weight", "down.bias", "unused.weight", "unused.bias"]
        return optimizer.owners()

    for owners in run_ranks(check, 4):  # two matrices, four ranks
        assert set(owners) == {"up.weight", "square.weight"}
        assert len(set(owners.values())) == 2
