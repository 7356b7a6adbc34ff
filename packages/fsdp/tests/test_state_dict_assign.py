"""`load_state_dict(assign=True)` on meta, as transformers and accelerate load, beside FSDP2."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import distribute_tensor

import fsdp
from testkit import run_ranks
from testkit.models.residual_stack import losses, shard, stack

pytestmark = pytest.mark.ranks


class Tied(nn.Module):
    """An embedding whose weight the head has, too, in one group with a layer between."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle = (
            nn.Embedding(8, 6),
            nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)),
        )
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embed(tokens)))


def sharded_like(model, values, dtype=torch.float32):
    """A full state dict placed as a sharded model is, a new tensor for each key."""
    return {
        name: distribute_tensor(values[name].to(dtype), param.device_mesh, param.placements)
        for name, param in model.state_dict().items()
    }


def full(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randint(8, (4,), generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found), full(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_modules_and_tied_parameters_load_and_train_as_in_fsdp2(dtype):
    def check():
        torch.manual_seed(0)
        values = Tied().state_dict()
        found = []
        for package in (fsdp, torch_fsdp):
            with torch.device("meta"):
                model = Tied()
            package.fully_shard(model.middle[1])
            package.fully_shard(model)
            model.load_state_dict(sharded_like(model, values, dtype), assign=True)
            assert all(param.dtype == dtype for param in model.parameters())
            for name, value in full(model).items():
                assert torch.equal(value, values[name].to(dtype)), name
            found.append(train(model))
            assert model.head.weight is model.embed.weight
        (actual, actual_after), (native, native_after) = found
        assert torch.equal(actual, native)
        assert all(torch.equal(actual_after[name], native_after[name]) for name in native_after)

    run_ranks(check, 2)


def test_loaded_shards_are_views_of_one_buffer_and_keep_their_identity():
    def check():
        values = stack().state_dict()
        with torch.device("meta"):
            model = stack()
        shard(fsdp, model)
        loaded = sharded_like(model, values)
        model.load_state_dict(loaded, assign=True)
        storages = {p.to_local().untyped_storage().data_ptr() for p in model[0].parameters()}
        assert len(storages) == 1
        before = list(model.parameters())
        actual = losses(model)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert torch.equal(actual, losses(shard(fsdp, stack())))

    run_ranks(check, 2)


def test_part_of_a_group_loads_and_the_next_forward_names_the_rest():
    def check():
        torch.manual_seed(0)
        values = Tied().state_dict()
        with torch.device("meta"):
            model = Tied()
        fsdp.fully_shard(model)
        loaded = sharded_like(model, values)
        late = {name: loaded.pop(name) for name in ("middle.1.weight", "middle.1.bias")}
        missing = model.load_state_dict(loaded, strict=False, assign=True).missing_keys
        assert sorted(missing) == sorted(late)
        with pytest.raises(RuntimeError, match=r"'middle.1.weight', 'middle.1.bias' are on the me"):
            model(torch.zeros(1, dtype=torch.int64))
        model.reset_iter_state()
        middle = {name.removeprefix("middle.1."): value for name, value in late.items()}
        model.middle[1].load_state_dict(middle, assign=True)  # the others are not disturbed
        for name, value in full(model).items():
            assert torch.equal(value, values[name]), name
        train(model)

    run_ranks(check, 2)


def test_tied_parameters_load_under_either_name():
    def check():
        torch.manual_seed(0)
        model = fsdp.fully_shard(Tied())
        for key in ("embed.weight", "head.weight"):
            values = {key: torch.randn(8, 6)}
            torch.distributed.broadcast(values[key], 0)
            placed = model.embed.weight
            new = distribute_tensor(values[key], placed.device_mesh, placed.placements)
            model.load_state_dict({key: new}, strict=False, assign=True)
            assert model.head.weight is model.embed.weight
            assert torch.equal(model.embed.weight.full_tensor(), values[key])

    run_ranks(check, 2)


def test_mixed_dtypes_are_an_error_at_the_next_unshard():
    def check():
        torch.manual_seed(0)
        values = Tied().state_dict()
        model = fsdp.fully_shard(Tied())
        loaded = sharded_like(model, values)
        loaded["middle.0.bias"] = loaded["middle.0.bias"].double()
        model.load_state_dict(loaded, assign=True)
        with pytest.raises(RuntimeError, match=r"expected one dtype .*float32, torch.float64"):
            model(torch.zeros(1, dtype=torch.int64))

    run_ranks(check, 2)
