"""Muon: torch's figures whatever the ranks and the granularity."""

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


@pytest.mark.ranks
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fifty_steps_are_torchs_bit_for_bit(ranks, granularity):
    def check():
        ours, theirs = sharded(fully_shard, GRANULARITIES[granularity]), MatrixNet()
        losses = train(ours, optimizer_of(Muon, ours)), train(theirs, TorchMuon(theirs))
        return losses, same_bits(full_tensors(ours), full_tensors(theirs))

    for (ours, theirs), differing in run_ranks(check, ranks):
        assert ours == theirs
        assert ours[-1] < ours[0]
        assert differing == []


OPTIONS = [
    {"nesterov": False},
    {"momentum": 0.5, "weight_decay": 0.0, "ns_steps": 3},
    {"adjust_lr_fn": "match_rms_adamw", "eps": 10.0},
    {"ns_coefficients": (2.0, -1.5, 0.5)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: ",".join(one))
def test_options_are_torchs_on_plain_parameters(options):
    ours, theirs = MatrixNet(), MatrixNet()
    losses = train(ours, optimizer_of(Muon, ours, **options), 5)
    assert losses == train(theirs, TorchMuon(theirs, **options), 5)
    assert same_bits(full_tensors(ours), full_tensors(theirs)) == []


def test_a_learning_rate_may_be_a_tensor():
    ours, theirs = MatrixNet(), MatrixNet()
    optimizer = optimizer_of(Muon, ours, lr=torch.tensor(0.02, dtype=torch.float64))
    assert train(ours, optimizer, 3) == train(theirs, TorchMuon(theirs), 3)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    """torch rounds an update of bfloat16 twice where it lies in no whole vector of the CPU."""

    def check():
        model = fully_shard(MatrixNet().to(dtype))
        return train(model, optimizer_of(Muon, model), 8)

    alone, theirs = MatrixNet().to(dtype), MatrixNet().to(dtype)
    wanted = train(alone, optimizer_of(Muon, alone), 8)
    assert run_ranks(check, 2) == [wanted] * 2
    tolerance = {torch.bfloat16: 0.05, torch.float64: 0.0}[dtype]
    assert train(theirs, TorchMuon(theirs), 8) == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_how_a_parameter_is_cut_does_not_change_what_an_update_makes_of_it(dtype):
    generator = torch.Generator().manual_seed(0)
    start, update = torch.randn(2, 4810, generator=generator).to(dtype)
    whole, cut = start.clone(), start.clone()
    subtract_(whole, update, 0.02)
    for part, own in zip(cut.split(13), update.split(13), strict=True):
        subtract_(part, own, 0.02)
    assert torch.equal(cut, whole)
    torch.testing.assert_close(whole, (start.double() - 0.02 * update.double()).to(dtype))


def test_a_schedule_changes_the_learning_rate_of_both_kinds():
    ours, theirs = MatrixNet(), MatrixNet()
    one, others = optimizer_of(Muon, ours), TorchMuon(theirs)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (one, *others.both)]
    for step in range(4):
        assert train(ours, one, 1, step) == train(theirs, others, 1, step)
        for schedule in schedules:
            schedule.step()


class Stacks(nn.Module):
    """Five experts in one parameter, a fused QKV, and a projection of unlike rows."""

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
    """The matrices as parameters of their own."""
    found = list(stacks.experts.detach().clone())
    for name, rows in ROWS.items():
        found += [one.clone() for one in getattr(stacks, name).detach().split(rows)]
    return [nn.Parameter(one) for one in found]


def stack_muon(model):
    groups = [
        {"params": [(name, param)], "split": SPLITS[name]}
        for name, param in model.named_parameters()
    ]
    return Muon(groups, lr=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_heads_and_projections_are_matrices_of_their_own(ranks):
    def check():
        model = Stacks()
        fully_shard(model)
        params = apart(Stacks())
        ours, theirs = stack_muon(model), torch.optim.Muon(params, lr=0.1)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(3, 6)).backward()
            with torch.no_grad():
                parts = list(full_tensor(model.experts.grad))
                for name, rows in ROWS.items():
                    parts += full_tensor(getattr(model, name).grad).split(rows)
            for param, grad in zip(params, parts, strict=True):
                param.grad = grad.contiguous()
            ours.step()
            theirs.step()
            ours.zero_grad()
        got = Stacks()
        for name, param in model.named_parameters():
            getattr(got, name).data = full_tensor(param)
        assert all(torch.equal(a, b) for a, b in zip(apart(got), params, strict=True))
        return ours.owners()

    owners = run_ranks(check, ranks)
    assert all(one == owners[0] for one in owners)
    assert len(owners[0]) == 5 + 3 + 3
    assert {owners[0][f"experts[{n}]"] for n in range(5)} == set(range(ranks))


def steps_of(model, optimizer, inputs, steps=3):
    """Steps ours and torch's with the same gradients: the names of matrices that differ."""
    alone = {name: nn.Parameter(full_tensor(param)) for name, param in matrices_of(model)}
    theirs = torch.optim.Muon(alone.values(), lr=0.02)
    for step in range(steps):
        model(inputs(step)).sum().backward()
        for name, param in matrices_of(model):
            alone[name].grad = None if param.grad is None else full_tensor(param.grad)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
    return same_bits(full_tensors(model), alone)


@pytest.mark.ranks
def test_hybrid_shards_are_gathered_within_their_axis():
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
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp and tp", "tp alone"])
def test_tensor_parallel_matrices_are_whole_where_they_iterate(fsdp):
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
def test_stacked_experts_beside_expert_and_tensor_parallelism(dim):
    """Cut along dim 0 each rank has whole experts; along others a part of each."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = nn.Module()
        values = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
        model.experts = nn.Parameter(distribute_tensor(values, mesh["ep"], [Shard(dim)]))
        fully_shard(model, mesh=mesh["dp"])
        ours = Muon(model.named_parameters(), lr=0.1)
        alone = [nn.Parameter(one) for one in values.clone()]
        theirs = torch.optim.Muon(alone, lr=0.1)
        for _ in range(2):
            model.experts.grad = torch.zeros_like(model.experts)
            torch.manual_seed(dist.get_rank())
            model.experts.grad.to_local().normal_()
            for param, grad in zip(alone, full_tensor(model.experts.grad), strict=True):
                param.grad = grad.contiguous()
            ours.step()
            theirs.step()
        assert torch.equal(full_tensor(model.experts), torch.stack(list(alone)))
        return ours.owners()

    for owners in run_ranks(check, 4):
        assert len(owners) == (2 if dim == 0 else 4)


@pytest.mark.ranks
def test_torchs_fully_shard_is_served_too():
    def check():
        model = torch_fully_shard(MatrixNet())
        torch.manual_seed(dist.get_rank())
        assert (
            steps_of(model, optimizer_of(Muon, model), lambda step: torch.randint(0, 11, (4, 6)))
            == []
        )

    run_ranks(check, 3)


@pytest.mark.ranks
def test_frozen_and_unused_matrices_stay_and_ranks_may_have_nothing_to_do():
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
