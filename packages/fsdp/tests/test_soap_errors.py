"""Errors of SOAP name the parameter; blocks that are not finite are skipped with a warning."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp import Block, Rows, fully_shard
from fsdp.optim import SOAP
from ragged_shard import InterleavedShard, RaggedShard
from testkit import run_ranks
from testkit.models.matrix_net import (
    MatrixNet,
    full_tensor,
    full_tensors,
    optimizer_of,
    same_bits,
    sharded,
    train,
)


def test_parameter_that_is_not_a_matrix_is_named():
    model = MatrixNet()
    with pytest.raises(ValueError, match=r"SOAP: .*'norm.weight' .*\(13,\).*use_soap="):
        SOAP(model.named_parameters())
    optimizer = optimizer_of(SOAP, model)
    with pytest.raises(ValueError, match=r"SOAP: .* parameter 'late'"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3)))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0}, {"lr": torch.zeros(2)}, {"eps": -1.0}, {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"precondition_frequency": 0},
        {"precondition_frequency": 2.5}, {"block_size": 0}, {"bucket_mb": 0},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=rf"SOAP: expected {next(iter(options))}"):
        SOAP([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 4])
def test_gradient_that_is_not_finite_skips_its_block_with_a_warning(ranks):
    """The same on one device; columns 8 to 12 of rows 16 to 23 are a block of `up.weight`."""

    def check(with_nan):
        model = sharded(fully_shard) if dist.is_initialized() else MatrixNet()
        optimizer = optimizer_of(SOAP, model, block_size=8, weight_decay=0.0)
        train(model, optimizer, 3)
        # On one rank the full tensor is the parameter's own memory.
        before = full_tensor(model.up.weight).clone()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if with_nan:
            grad = torch.ones(37, 13)
            grad[17, 9] = torch.nan
            weight = model.up.weight
            model.up.weight.grad = (
                distribute_tensor(grad, weight.device_mesh, weight.placements)
                if dist.is_initialized()
                else grad
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        after = full_tensor(model.up.weight).clone()
        losses = train(model, optimizer, 3, 3)
        return before, after, [str(one.message) for one in caught], losses, full_tensors(model)

    _, expected, no_warnings, *_ = check(False)
    assert no_warnings == []
    *_, expected_params = check(True)
    found = run_ranks(check, ranks, True)
    for before, after, _, losses, params in found:
        assert after[16:24, 8:].equal(before[16:24, 8:])
        after[16:24, 8:] = expected[16:24, 8:]
        assert after.equal(expected)
        assert torch.tensor(losses).isfinite().all()
        assert same_bits(params, expected_params) == []
    [text] = [text for _, _, caught, _, _ in found for text in caught]  # of the owner
    assert "parameter 'up.weight[16:24]', columns 8 to 12" in text


@pytest.mark.ranks
def test_unsupported_placements_are_an_error_before_anything_is_sent():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))

        def optimizer(placements, rows=4):
            param = nn.Parameter(distribute_tensor(torch.ones(rows, 6), mesh, placements))
            param.grad = torch.ones_like(param)
            return SOAP([("qkv", param)])

        interleaved = optimizer([InterleavedShard(0, 2), Replicate()], 6)  # two chunks of 3 rows
        with pytest.raises(ValueError, match=r"SOAP: .*'qkv'.* dim 0 of size 6 on 2 ranks"):
            interleaved.step()
        uneven = optimizer([Shard(0), RaggedShard((0,), (1,))], 5)
        with pytest.raises(
            ValueError, match=r"'qkv' of shape \(5, 6\).* dim 0 of size 5 on 2 ranks"
        ):
            uneven.step()
        moved = optimizer([Shard(0), Replicate()])
        [param] = moved.param_groups[0]["params"]
        param.grad = param.grad.redistribute(placements=[Replicate(), Replicate()])
        with pytest.raises(ValueError, match=r"gradient of parameter 'qkv' .* placed as"):
            moved.step()

    run_ranks(check, 2)


@pytest.mark.ranks
def test_state_of_another_sharding_is_an_error_and_changes_nothing():
    """State of other owners, blocks or dtypes is an error, and changes nothing."""

    def check():
        rows, elements = sharded(fully_shard, Rows(3)), sharded(fully_shard, Block(1))
        optimizer, other = (optimizer_of(SOAP, model, block_size=8) for model in (rows, elements))
        train(rows, optimizer, 1)
        train(elements, other, 1)
        before = copy.deepcopy(optimizer.state_dict())
        moved = copy.deepcopy(before)
        last = moved["state"][0]["left.0"]
        owner = last.placements[0].owner
        moved["state"][0]["left.0"] = last.redistribute(
            placements=[RaggedShard.owned_by(1 - owner, 2)]
        )
        with pytest.raises(ValueError, match=r"SOAP: left.0 of parameter 'up.weight'"):
            optimizer.load_state_dict(moved)
        halved = copy.deepcopy(before)
        halved["state"][0]["right.1"] = halved["state"][0]["right.1"].bfloat16()
        with pytest.raises(
            ValueError, match=r"right.1 of parameter 'up.weight' .* got torch.bfloat16"
        ):
            optimizer.load_state_dict(halved)
        others = optimizer_of(SOAP, rows, block_size=16)
        with pytest.raises(ValueError, match=r"'up.weight'.* has 'exp_avg.3'.*block_size"):
            others.load_state_dict(before)
        shifted = copy.deepcopy(before)
        shifted["state"][1]["momentum"] = shifted["state"][1].pop("left.0")
        with pytest.raises(ValueError, match=r"of parameter 'down.weight'.* lacks 'left.0'"):
            optimizer.load_state_dict(shifted)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert after["state"][0]["left.0"].placements == before["state"][0]["left.0"].placements
        optimizer.load_state_dict(before)
        assert len(train(rows, optimizer, 1)) == 1

    run_ranks(check, 2)


def test_state_dict_keeps_dtypes_and_training_resumes():
    model = MatrixNet().bfloat16()
    optimizer = optimizer_of(SOAP, model, block_size=8)
    train(model, optimizer, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    expected = train(model, optimizer, 12, 3)
    other = MatrixNet().bfloat16()
    other.load_state_dict(weights)
    loaded = optimizer_of(SOAP, other, block_size=8)
    loaded.load_state_dict(saved)
    assert loaded.state[other.up.weight]["left.0"].dtype == torch.float32
    assert train(other, loaded, 12, 3) == expected


def test_precondition_frequency_may_be_a_numpy_integer():
    SOAP([nn.Parameter(torch.ones(4, 4))], precondition_frequency=np.int64(5))
    with pytest.raises(ValueError, match=r"precondition_frequency .* got 5\.0"):
        SOAP([nn.Parameter(torch.ones(4, 4))], precondition_frequency=5.0)
