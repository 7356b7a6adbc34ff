"""Adam8bit on ranks: the same bits with any sharding, no communication, checkpoints.

All ranks have the same batch, so that gradients are the same bits at any power of two of ranks.
"""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp
from fsdp import Block, Rows, Whole
from fsdp.optim import Adam8bit
from ragged_shard import StridedRaggedShard
from testkit import CommLog, run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.block_net import SIZE, losses, model_of, optimizer_of, step

GRANULARITIES = {"rows": Rows(32), "block": Block(SIZE), "larger block": Block(5 * SIZE)}
pytestmark = pytest.mark.ranks
with_dcp = pytest.mark.filterwarnings("ignore")  # of DCP itself


def sharded(granularity=None, package=fsdp, **options):
    model = model_of()
    if granularity is not None:
        options["shard_placement_fn"] = lambda param: granularity
    package.fully_shard(model[1], **options)
    return package.fully_shard(model, **options)


def full_flat(tensor):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().reshape(-1).clone()


def full_state(model, optimizer):
    """Returns all full parameters and state tensors, flat."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = full_flat(param)
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = full_flat(value)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


def reference(steps, **options):
    model = model_of()
    optimizer = optimizer_of(Adam8bit, model, **options)
    return losses(model, optimizer, range(steps)), full_state(model, optimizer)


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4))]
)
def test_sharded_steps_have_the_same_bits_and_communicate_nothing(world):
    def check(expected):
        for name, granularity in GRANULARITIES.items():
            model = sharded(granularity)
            optimizer = optimizer_of(Adam8bit, model)
            assert losses(model, optimizer, range(19)) == expected[0][:19], name
            torch.manual_seed(119)
            x = torch.randn(8, 24)
            (model(x) - x.flip(1)).square().mean().backward()
            with CommLog() as log:
                optimizer.step()
            log.assert_counts({})
            assert_same(full_state(model, optimizer), expected[1])

    run_ranks(check, world, reference(20))


def test_state_has_the_placements_of_parameters():
    def check():
        model = sharded(Rows(32))
        optimizer = optimizer_of(Adam8bit, model)
        step(model, optimizer, 0)
        for param in model.parameters():
            state = optimizer.state[param]
            assert state["exp_avg"].placements == state["exp_avg_sq"].placements == param.placements
            if param.numel() >= 128:
                assert state["exp_avg"].dtype is torch.uint8
                local = param.to_local().numel()
                assert state["exp_avg_scale"].to_local().numel() == -(-local // SIZE)
                assert state["exp_avg_sq_scale"].shape == (-(-param.numel() // SIZE),)

    run_ranks(check, 2)


def _warnings_of_split_blocks(package, world):
    """Trains with shards that split blocks, and returns the warnings."""
    expected = reference(10)

    def check():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = sharded(None, package)
            optimizer = optimizer_of(Adam8bit, model)
            assert losses(model, optimizer, range(10)) == expected[0]
        assert_same(full_state(model, optimizer), expected[1])
        return [str(w.message) for w in caught if "Adam8bit" in str(w.message)]

    return run_ranks(check, world)


@pytest.mark.parametrize("package", [fsdp, torch_fsdp], ids=["fsdp", "FSDP2"])
def test_split_blocks_are_redistributed_with_one_warning_per_parameter(package):
    shapes = {name: param.shape for name, param in model_of().named_parameters()}
    for messages in _warnings_of_split_blocks(package, 4):
        named = {text.split("'")[1]: text for text in messages}
        assert len(messages) == len(named) > 0
        for name, text in named.items():
            rows = SIZE // math.gcd(SIZE, shapes[name][1])
            assert "split a block of 64" in text
            assert f"Rows({rows}) or Block(64)" in text


def test_column_sharded_and_replicated_parameters_have_the_same_bits():
    def check(expected):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Replicate(), Shard(1)):
            model = model_of()
            for module in model.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    at = placement if param.ndim == 2 else Replicate()
                    placed = nn.Parameter(distribute_tensor(param.detach(), mesh, [at]))
                    module.register_parameter(name, placed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer = optimizer_of(Adam8bit, model)
                for grads in expected["grads"]:
                    for name, param in model.named_parameters():
                        grad = distribute_tensor(grads[name], mesh, [Replicate()])
                        param.grad = grad.redistribute(placements=param.placements)
                    optimizer.step()
            assert len([w for w in caught if "Adam8bit" in str(w.message)]) == (
                3 if placement.is_shard() else 0
            )
            assert_same(full_state(model, optimizer), expected["state"])

    model = model_of()
    optimizer, grads = optimizer_of(Adam8bit, model), []
    for _ in range(3):
        grads.append({name: torch.randn_like(p) for name, p in model.named_parameters()})
        for name, param in model.named_parameters():
            param.grad = grads[-1][name].clone()
        optimizer.step()
    run_ranks(check, 2, {"grads": grads, "state": full_state(model, optimizer)})


def test_hsdp_has_the_same_bits():
    def check(expected):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(Block(SIZE), mesh=mesh)
        optimizer = optimizer_of(Adam8bit, model)
        assert losses(model, optimizer, range(5)) == expected[0]
        assert_same(full_state(model, optimizer), expected[1])

    run_ranks(check, 4, reference(5))


def test_blocks_with_tensor_parallelism_are_those_of_local_tensors():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = Mlp()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fsdp.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Block(SIZE))
        optimizer = optimizer_of(Adam8bit, model)
        grads = {}
        for number in range(3):
            torch.manual_seed(number)
            model(torch.randn(4, 16)).square().mean().backward()
            for name, param in model.named_parameters():
                grads.setdefault(name, []).append(full_flat(param.grad).view(param.shape))
            with CommLog() as log:
                optimizer.step()
            log.assert_counts({})
            optimizer.zero_grad()
        assert isinstance(model.up.weight.placements[0], StridedRaggedShard)
        rank = mesh.get_local_rank("tp")
        for name, dim in (("up.weight", 0), ("down.weight", 1)):
            start = Mlp().get_parameter(name).detach().chunk(2, dim)[rank].contiguous()
            local = nn.Parameter(start)
            other = optimizer_of(Adam8bit, nn.ParameterDict({"w": local}))
            for grad in grads[name]:
                local.grad = grad.chunk(2, dim)[rank].contiguous()
                other.step()
            param = model.get_parameter(name)
            assert torch.equal(param.full_tensor().chunk(2, dim)[rank], local)
            scales = optimizer.state[param]["exp_avg_scale"]
            assert scales.shape == (2, 8)
            assert torch.equal(scales.full_tensor()[rank], other.state[local]["exp_avg_scale"])

    run_ranks(check, 4)


# Checkpoints.


def _save(path, granularity):
    model = sharded(granularity)
    optimizer = optimizer_of(Adam8bit, model)
    losses(model, optimizer, range(5))
    save_checkpoint(path, model, optimizer)
    return losses(model, optimizer, range(5, 10))


def _load(path, granularity, package=fsdp, **options):
    model = sharded(granularity, package)
    optimizer = optimizer_of(Adam8bit, model, **options)
    load_checkpoint(path, model, optimizer)
    assert float(optimizer.state[model[0].weight]["step"]) == 5
    return losses(model, optimizer, range(5, 10))


@with_dcp
@pytest.mark.parametrize(
    "saved_at",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_training_resumes_at_other_ranks_and_granularities_with_the_same_losses(tmp_path, saved_at):
    path = str(tmp_path / "c")
    expected = run_ranks(_save, saved_at, path, Rows(32))[0]
    assert expected == reference(10)[0][5:]
    for world in {1, 2, 4} - {saved_at}:
        for granularity in (Block(SIZE), Whole(), None):
            for found in run_ranks(_load, world, path, granularity):
                assert found == expected
    for found in run_ranks(_load, 2, path, None, torch_fsdp):
        assert found == expected


@with_dcp
def test_checkpoint_with_another_block_size_is_an_error(tmp_path):
    path = str(tmp_path / "c")
    run_ranks(_save, 2, path, Rows(32))

    def check():
        with pytest.raises(
            CheckpointException, match=r"Size mismatch .* for optimizer.*exp_avg_scale"
        ):
            _load(path, Block(SIZE), block_size=2 * SIZE)

    run_ranks(check, 2)


@with_dcp
@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_dicts_are_saved_and_loaded(broadcast):
    def check():
        model = sharded(Rows(32))
        optimizer = optimizer_of(Adam8bit, model)
        step(model, optimizer, 0)
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        both = [get_model_state_dict(model, options=full)]
        both.append(copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full)))
        if not broadcast:
            dist.broadcast_object_list(both, 0)
        other = sharded(Block(SIZE))
        another = optimizer_of(Adam8bit, other)
        load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, both[0], options=load)
        set_optimizer_state_dict(other, another, both[1], options=load)
        assert losses(model, optimizer, range(1, 4)) == losses(other, another, range(1, 4))
        assert_same(full_state(other, another), full_state(model, optimizer))

    run_ranks(check, 2)


def test_state_of_another_sharding_is_an_error_that_names_the_parameter():
    def check():
        model, other = sharded(Whole()), sharded(Block(SIZE))
        optimizer, another = optimizer_of(Adam8bit, model), optimizer_of(Adam8bit, other)
        step(model, optimizer, 0)
        step(other, another, 0)
        before = full_state(other, another)
        with pytest.raises(ValueError, match=r"exp_avg.* of parameter '0\.weight' .* reshards it"):
            another.load_state_dict(optimizer.state_dict())
        assert_same(full_state(other, another), before)

    run_ranks(check, 2)


def test_block_that_is_not_finite_is_named_on_its_owner_and_ranks_may_own_nothing():
    def check():
        model = sharded(Whole())
        optimizer = optimizer_of(Adam8bit, model)
        step(model, optimizer, 0)
        weight = model[0].weight
        local = weight.to_local()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        weight.grad.to_local().fill_(math.nan)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.step()
        return local.numel(), [str(w.message) for w in caught if "Adam8bit" in str(w.message)]

    found = run_ranks(check, 4)
    assert sum(owned > 0 for owned, _ in found) == 1
    for owned, messages in found:
        assert len(messages) == (owned > 0)
        assert all("parameter '0.weight' is not finite" in text for text in messages)
