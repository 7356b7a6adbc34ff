"""Quantized weights: checkpoints, tensor parallelism, and errors that name the parameter."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp
from fsdp import Block, Rows, Tiles, Whole
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import run_ranks
from testkit.models.tile_net import batch, fake_quantized, losses, net, plain_losses

pytestmark = pytest.mark.ranks
with_dcp = pytest.mark.filterwarnings("ignore")  # DCP's own
SMALL, STRIPS = Tiles(rows=8, cols=8), Tiles(rows=8)


def of_matrices(tiles):
    return lambda param: tiles if param.ndim >= 2 else None


def sharded(package=fsdp, seed=None, **options):
    model = net()
    if seed is not None:
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.uniform_(param)
    for block in model[:-1]:
        package.fully_shard(block, **options)
    return package.fully_shard(model, **options)


def fake(name, weight):
    return fake_quantized(weight, torch.int8, 8, 8)


# Checkpoints.


KINDS = {
    "quantized": (fsdp, {"quantize_fn": of_matrices(SMALL)}),
    "plain": (fsdp, {}),
    "FSDP2": (torch_fsdp, {}),
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)  # which has no state of its own


def _save(path, kind):
    package, options = KINDS[kind]
    model = sharded(package, **options)
    losses(model, sgd(model), range(3))
    dcp.save(model.state_dict(), checkpoint_id=path)


def _load(path, kind):
    package, options = KINDS[kind]
    model = sharded(package, seed=1, **options)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    return losses(model, sgd(model), range(3, 6))


@with_dcp
@pytest.mark.parametrize(
    ("writer", "saved_at", "reader", "loaded_at"),
    [
        ("quantized", 2, "quantized", 4),
        pytest.param("quantized", 4, "plain", 2, marks=pytest.mark.slow),
        ("quantized", 2, "FSDP2", 2),
        ("plain", 4, "quantized", 2),
        pytest.param("FSDP2", 2, "quantized", 1, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_have_unquantized_weights(tmp_path, writer, saved_at, reader, loaded_at):
    path, model = str(tmp_path / "c"), net()
    optimizer, rounded = sgd(model), {"quantized": fake}
    plain = lambda name, weight: weight
    plain_losses(model, optimizer, range(3), rounded.get(writer, plain))
    wanted = plain_losses(model, optimizer, range(3, 6), rounded.get(reader, plain))
    run_ranks(_save, saved_at, path, writer)
    for found in run_ranks(_load, loaded_at, path, reader):
        assert found == wanted


def test_full_state_dict_is_saved_and_loaded():
    def check():
        model = sharded(quantize_fn=of_matrices(SMALL))
        losses(model, sgd(model), range(2))
        model(batch(0))  # the root's are unsharded now
        state = model.state_dict()
        assert isinstance(state["2.weight"], DTensor)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        alone = net()
        optimizer = sgd(alone)
        plain_losses(alone, optimizer, range(2), fake)
        for name, param in alone.named_parameters():
            assert torch.equal(full[name], param), name
        other = sharded(quantize_fn=of_matrices(SMALL), seed=1)
        other(batch(0))
        other.load_state_dict(state)
        assert torch.equal(other(batch(0)), model(batch(0)))

    run_ranks(check, 2)


# Other axes.


class Mlp(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def tensor_parallel(mesh, width=16):
    model = Mlp(width)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def test_tensor_parallelism_must_not_split_tiles():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tiles = Tiles(rows=2, cols=4)
        model = fsdp.fully_shard(
            tensor_parallel(mesh["tp"]), mesh=mesh["dp"], quantize_fn=of_matrices(tiles)
        )
        assert isinstance(model.up.weight.placements[0], StridedRaggedShard)
        assert isinstance(model.down.weight.placements[0], RaggedShard)
        model.unshard()
        for (name, param), given in zip(model.named_parameters(), Mlp().parameters(), strict=True):
            wanted = fake_quantized(given.detach(), torch.int8, 2, 4)
            assert torch.equal(param.full_tensor(), wanted), name
        model.reshard()
        x = torch.ones(2, 8)
        model(x).sum().backward()
        assert model.up.weight.grad.placements == model.up.weight.placements
        with pytest.raises(
            ValueError,
            match=r"'up.weight' of \(12, 8\) .* into \(6, 8\), .* tiles of 4 x 8; .* multiple of 4",
        ):
            fsdp.fully_shard(
                tensor_parallel(mesh["tp"], 12), mesh=mesh["dp"],
                quantize_fn=of_matrices(Tiles(rows=4, cols=8)),
            )  # fmt: skip

    run_ranks(check, 4)


# What is not finite, what is empty.


def test_non_finite_tile_is_nan_on_all_ranks_with_a_warning():
    def check(wrong):
        model = sharded(quantize_fn=of_matrices(SMALL))
        weight = model[0].up.weight  # 36 x 20
        own = weight.placements[0].interval(weight.shape, dist.get_rank())
        place = 17 * 20 + 3  # in the tile of rows 16 to 23 and columns 0 to 7
        mine = own.start <= place < own.stop
        if mine:
            with torch.no_grad():
                weight.to_local().view(-1)[place - own.start] = wrong
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model[0].unshard()
        bad = model[0].up.weight.isnan()
        assert bad[16:24, :8].all()
        assert bad.sum() == 8 * 8
        messages = [str(one.message) for one in caught]
        assert len(messages) == mine
        assert all(
            "parameter 'up.weight' has elements that are not finite" in one for one in messages
        )
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            model[0].reshard()
            assert model(batch(0)).isnan().all()
        return mine

    for wrong in (math.nan, math.inf, -math.inf):
        assert sorted(run_ranks(check, 2, wrong)) == [False, True]


def test_zero_weights_and_ranks_without_a_tile():
    def check():
        model = sharded(quantize_fn=of_matrices(SMALL))
        with torch.no_grad():
            model[2].weight.zero_()
        local_numel = model[2].weight.to_local().numel()
        assert torch.equal(model(batch(0)), model[2].bias.detach().expand(6, 5))
        model(batch(0)).sum().backward()
        assert model[2].weight.grad.full_tensor().any()
        return local_numel

    assert sorted(run_ranks(check, 4)) == [0, 0, 0, 5 * 20]  # of five rows: less than a tile


def test_group_of_one_empty_weight():
    def check():
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].weight = nn.Parameter(torch.zeros(0, 4))
        model[0].bias = None
        fsdp.fully_shard(model, quantize_fn=of_matrices(SMALL))
        assert model(torch.ones(2, 4)).shape == (2, 0)

    run_ranks(check, 2)


# What is wrong.


def linear(rows=32, cols=4):
    return nn.Sequential(nn.Linear(cols, rows))


def shard(granularity, tiles=STRIPS, model=None):
    return fsdp.fully_shard(
        linear() if model is None else model, quantize_fn=of_matrices(tiles),
        shard_placement_fn=lambda param: granularity if param.ndim >= 2 else None,
    )  # fmt: skip


CUTS = {"rows": Rows(12), "block": Block(8), "row": Shard(0), "whole strips": Block(48)}


@pytest.mark.parametrize("name", CUTS)
def test_granularity_that_splits_a_tile_is_refused(name):
    def check():
        with pytest.raises(
            ValueError,
            match=r"'0.weight' of \(32, 4\), .* tiles of 8 x 128; .* None, Rows\(8\), Block\(32\)",
        ):
            shard(CUTS[name])

    run_ranks(check, 1)


def test_granularity_of_whole_tiles_is_accepted():
    def check():
        for granularity in (None, Rows(8), Rows(16), Rows(99), Block(64), Whole()):
            model = linear()
            model[0].bias = None
            local_numel = shard(granularity, model=model)[0].weight.to_local().numel()
            one_owner = granularity in (Rows(99), Whole())
            assert local_numel in ((0, 32 * 4) if one_owner else (16 * 4,)), granularity
        model = linear()
        model[0].weight = nn.Parameter(torch.randn(4, 12, 4))  # a stack of four
        with pytest.raises(
            ValueError, match=r"'0.weight' of \(4, 12, 4\).* expected None, Rows\(12\)"
        ):
            shard(Rows(8), model=model)

    run_ranks(check, 2)


class Hooks(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        raise AssertionError


def hooked():
    model = linear()
    model[0].weight = nn.Parameter(torch.randn(32, 4).as_subclass(Hooks))
    return model


def integers():
    model = linear()
    model[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    return model


CHOICES = {
    "no tiles": (
        linear,
        lambda p: 128,
        r"expected Tiles\(...\), an OperandFormat or None for '0.weight', got 128",
    ),
    "a vector": (linear, lambda p: SMALL, r"None for '0.bias', a torch.float32 of \(32,\)"),
    "integers": (integers, of_matrices(SMALL), r"for '0.weight', a torch.int64 of \(2, 2\)"),
    "hooks": (hooked, of_matrices(SMALL), r"for '0.weight', a Hooks with fsdp_pre_all_gather"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_wrong_result_of_quantize_fn_is_refused(name):
    model_of, choose, message = CHOICES[name]

    def check():
        with pytest.raises(ValueError, match=message):
            fsdp.fully_shard(model_of(), quantize_fn=choose)

    run_ranks(check, 1)


def test_tiles_that_differ_between_ranks_are_an_error():
    def check():
        tiles = STRIPS if dist.get_rank() else Tiles(rows=8, cols=2)
        with pytest.raises(ValueError, match=r"'0.weight' in Tiles\(.*cols=2\)"):
            shard(None, tiles)(torch.ones(1, 4))

    run_ranks(check, 2)
