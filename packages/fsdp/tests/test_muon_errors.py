"""Errors of Muon: they name the parameter, on every rank."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp import Block, Rows, fully_shard
from fsdp.optim import SOAP, Muon
from fsdp.optim.matrix.split import matrix_rows
from ragged_shard import InterleavedShard
from testkit import run_ranks
from testkit.models.matrix_net import (
    MatrixNet,
    full_tensors,
    optimizer_of,
    same_bits,
    sharded,
    train,
)


def test_parameter_that_is_not_a_matrix_is_named():
    model = MatrixNet()
    with pytest.raises(ValueError, match=r"parameter 'norm.weight' .* of shape \(13,\).*AdamW"):
        Muon(model.named_parameters())
    optimizer = optimizer_of(Muon, model)
    with pytest.raises(ValueError, match=r"parameter 'late'"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3)))]})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(ValueError, match=r"parameter '1 of group 0'"):
        Muon([model.up.weight, model.up.bias])
    with pytest.raises(ValueError, match=r"'turned' of shape \(3, 2\) .* strides \(1, 3\)"):
        Muon([("turned", nn.Parameter(torch.zeros(2, 3).T))])


@pytest.mark.parametrize("split", [3, 0, (5, 6), (12, -2), lambda param: 4])
def test_split_that_does_not_fit_the_rows(split):
    with pytest.raises(ValueError, match=r"split of parameter 'w' .* 10 rows"):
        Muon([("w", nn.Parameter(torch.zeros(10, 4)))], split=split)


PATTERNS = {
    r"match none": {r"a\.qk": 2},  # not the whole name
    r"match none.*": {"head": 2},  # a parameter of AdamW
    r"split of parameter 'b.qkv' .* 10 rows": {r"b\..*": 3},
    r"one pattern .* 'a.qkv'": {"a.*": 2, ".*qkv": 2},
    r"regular expressions, got '\('": {"(": 2},
}


@pytest.mark.parametrize("message", PATTERNS)
@pytest.mark.parametrize("kind", [Muon, SOAP], ids=["Muon", "SOAP"])
def test_patterns_that_fit_no_parameter(kind, message):
    def groups():
        matrices = [(name, nn.Parameter(torch.zeros(10, 4))) for name in ("a.qkv", "b.qkv")]
        head = [("head", nn.Parameter(torch.zeros(10, 4)))]
        return [{"params": matrices}, {"params": head, f"use_{kind.__name__.lower()}": False}]

    with pytest.raises(ValueError, match=message):
        kind(groups(), split=PATTERNS[message])
    first, rest = groups()
    with pytest.raises(ValueError, match=message):
        kind([first | {"split": PATTERNS[message]}, rest])


def test_patterns_need_names_and_default_ones_may_match_in_any_group():
    first, second = (nn.Parameter(torch.zeros(10, 4)) for _ in range(2))
    with pytest.raises(ValueError, match=r"with names, as split has patterns"):
        Muon([first], split={".*": 2})
    groups = [{"params": [("a", first)]}, {"params": [("b", second)]}]
    Muon(groups, split={"a": 2, "b": 5})
    own = [groups[0], groups[1] | {"split": {"b": 5}}]
    with pytest.raises(ValueError, match=r"got \['b'\], which match none"):
        Muon(own, split={"a": 2, "b": 2})


def test_options_of_matrices_in_a_group_of_adamw():
    group = {"params": [nn.Parameter(torch.zeros(4))], "use_muon": False, "split": 2, "ns_steps": 3}
    with pytest.raises(ValueError, match=r"use_muon=False .* got ns_steps, split; remove"):
        Muon([group])


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -0.1}, {"ns_steps": 100}, {"adjust_lr_fn": "x"}, {"bucket_mb": 0}],
    ids=str,
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=rf"Muon: expected {next(iter(options))}"):
        Muon([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Muon, SOAP], ids=["Muon", "SOAP"])
def test_gradient_on_some_ranks_only_is_an_error_on_all(kind):
    def check():
        model = sharded(fully_shard)
        optimizer = optimizer_of(kind, model)
        model(torch.arange(6)).backward()
        if dist.get_rank() == 1:
            model.square.weight.grad = None
        before = full_tensors(model)
        with pytest.raises(
            ValueError,
            match=rf"{kind.optimizer_name}.* square.weight .*: a gradient on rank 0 and .*no gra",
        ):
            optimizer.step()
        assert same_bits(full_tensors(model), before) == []

    run_ranks(check, 2)


@pytest.mark.ranks
def test_unsupported_placements_are_an_error_before_anything_is_sent():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))

        def optimizer(placements, **options):
            param = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, placements))
            param.grad = torch.ones_like(param)
            return Muon([("qkv", param)], **options)

        strided = nn.Parameter(
            DTensor.from_local(
                torch.ones(2, 6),
                mesh,
                [Shard(0), _StridedShard(0, split_factor=2)],
                run_check=False,
            )
        )
        strided.grad = torch.ones_like(strided)
        with pytest.raises(
            ValueError, match=r"expected parameter 'qkv' to have RaggedShard on at most one axis"
        ):
            Muon([("qkv", strided)]).step()
        split = optimizer([InterleavedShard(0, 2), Replicate()], split=(3, 1))
        with pytest.raises(ValueError, match=r"'qkv', which is split into matrices of \(3, 1\)"):
            split.step()
        values = torch.ones(5, 4, 6)
        experts = nn.Parameter(distribute_tensor(values, mesh, [Shard(0), Replicate()]))
        experts.grad = torch.ones_like(experts)
        with pytest.raises(ValueError, match=r"Muon: .*'experts'.* dim 0 of size 5 on 2 ranks"):
            Muon([("experts", experts)], normuon_beta2=0.9).step()
        moved = optimizer([Shard(0), Replicate()])
        [param] = moved.param_groups[0]["params"]
        param.grad = param.grad.redistribute(placements=[Replicate(), Replicate()])
        with pytest.raises(ValueError, match=r"gradient of parameter 'qkv' .* placed as"):
            moved.step()

    run_ranks(check, 2)


@pytest.mark.ranks
def test_state_of_another_sharding_is_an_error_and_changes_nothing():
    def check():
        rows, elements = sharded(fully_shard, Rows(3)), sharded(fully_shard, Block(1))
        optimizer, other = optimizer_of(Muon, rows), optimizer_of(Muon, elements)
        train(rows, optimizer, 1)
        train(elements, other, 1)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"momentum_buffer of parameter 'up.weight'"):
            optimizer.load_state_dict(other.state_dict())
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        optimizer.load_state_dict(before)
        assert len(train(rows, optimizer, 1)) == 1

    run_ranks(check, 2)


@pytest.mark.parametrize("split", [np.int64(2), [np.int64(5), np.int64(5)]], ids=["number", "rows"])
def test_split_may_have_numpy_integers(split):
    assert matrix_rows(split, nn.Parameter(torch.zeros(10, 4)), "w", "Muon") == (5, 5)
