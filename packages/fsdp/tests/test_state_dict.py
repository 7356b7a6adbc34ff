"""Checkpoints: sharded and full, to other numbers of ranks, from and to FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp
from ragged_shard import from_checkpointable, to_checkpointable
from testkit import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore"),  # DCP's own
]


def _model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 5)), nn.Linear(5, 3)
    )


def _shard(package, model):
    package.fully_shard(model[1])
    return package.fully_shard(model)


def _step(model, optimizer, step):
    torch.manual_seed(step)
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _make(package, seed):
    model = _shard(package, _model(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _state(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def _save(path, name, asynchronous=False):
    package = {"fsdp": fsdp, "torch": torch_fsdp}[name]
    model, optimizer = _make(package, 0)
    for step in range(2):
        _step(model, optimizer, step)
    if asynchronous:
        dcp.async_save(_state(model, optimizer), checkpoint_id=path).result()
    else:
        dcp.save(_state(model, optimizer), checkpoint_id=path)
    return [_step(model, optimizer, step) for step in range(2, 5)]


def _load(path, name):
    package = {"fsdp": fsdp, "torch": torch_fsdp}[name]
    model, optimizer = _make(package, 1)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return [_step(model, optimizer, step) for step in range(2, 5)]


@pytest.mark.parametrize(
    ("writer", "saved_at", "reader", "loaded_at"),
    [
        ("fsdp", 1, "fsdp", 2),
        ("torch", 2, "fsdp", 2),
        # Saved on two ranks: read by all in the next test.
        *(
            pytest.param("fsdp", saved, reader, loaded, marks=pytest.mark.slow)
            for saved, reader, loaded in (
                (2, "fsdp", 2),
                (2, "fsdp", 1),
                (4, "fsdp", 3),
                (2, "torch", 2),
            )
        ),
    ],
)
def test_training_resumes_from_a_checkpoint(tmp_path, writer, saved_at, reader, loaded_at):
    wanted = run_ranks(_save, saved_at, str(tmp_path / "c"), writer)[0]
    for losses in run_ranks(_load, loaded_at, str(tmp_path / "c"), reader):
        torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-7)


class OneDevice:
    """Shards nothing."""

    @staticmethod
    def fully_shard(model):
        return model


SYSTEMS = {
    "fsdp on 2": (fsdp, 2),
    "fsdp on 4": (fsdp, 4),
    "FSDP2 on 2": (torch_fsdp, 2),
    "one process": (OneDevice, 1),
}
# With the attributes of DCP's CheckpointableTensor, and with the methods of DTensor.
WAYS = {"attributes": to_checkpointable, "methods": lambda state: state}


def _save_in(path, system):
    model, optimizer = _make(SYSTEMS[system][0], 0)
    for step in range(2):
        _step(model, optimizer, step)
    for way, convert in WAYS.items():
        dcp.save(convert(_state(model, optimizer)), checkpoint_id=f"{path}/{way}")
    return [_step(model, optimizer, step) for step in range(2, 5)]


def _load_in(path, system):
    losses = []
    for saved in WAYS:
        for convert in WAYS.values():
            model, optimizer = _make(SYSTEMS[system][0], 1)
            state = _state(model, optimizer)
            found = convert(state)
            dcp.load(found, checkpoint_id=f"{path}/{saved}")
            state = from_checkpointable(found, state)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            losses.append([_step(model, optimizer, step) for step in range(2, 5)])
    return losses


@pytest.mark.parametrize(
    "writer",
    [
        "fsdp on 2",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("FSDP2 on 2", "fsdp on 4", "one process")
        ),
    ],
)
def test_checkpoints_are_exchanged_both_ways_with_fsdp2_and_other_ranks(tmp_path, writer):
    wanted = run_ranks(_save_in, SYSTEMS[writer][1], tmp_path, writer)[0]
    for reader, (_, ranks) in SYSTEMS.items():
        for of_rank in run_ranks(_load_in, ranks, tmp_path, reader, timeout=120):
            for losses in of_rank:
                torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-7, msg=reader)


def test_async_save_has_the_values_of_its_step(tmp_path):
    def save(path):
        dist.new_group(backend="gloo")
        return _save(path, "fsdp", asynchronous=True)

    wanted = run_ranks(save, 2, str(tmp_path / "c"))[0]
    for losses in run_ranks(_load, 2, str(tmp_path / "c"), "fsdp"):
        assert losses == wanted


@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_dicts_are_saved_and_loaded(broadcast):
    def check():
        model, optimizer = _make(fsdp, 0)
        _step(model, optimizer, 0)
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=full)
        moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))
        if dist.get_rank() == 0:
            assert [tuple(value.shape) for value in weights.values()] == [
                tuple(value.shape) for value in _model(0).state_dict().values()
            ]
        both = [weights, moments]
        if not broadcast:
            dist.broadcast_object_list(both, 0)
        other, other_optimizer = _make(fsdp, 1)
        load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, both[0], options=load)
        set_optimizer_state_dict(other, other_optimizer, both[1], options=load)
        for step in range(1, 4):
            assert _step(model, optimizer, step) == _step(other, other_optimizer, step)

    run_ranks(check, 2)


def test_state_dict_has_sharded_parameters_while_modules_are_unsharded():
    def check():
        model, _ = _make(fsdp, 0)
        with torch.no_grad():
            model(torch.randn(4, 5))
        assert not isinstance(model[0].weight, DTensor)  # the root stays unsharded
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert list(state) == list(_model(0).state_dict())

    run_ranks(check, 2)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_copies_into_the_shard_buffer(assign):
    def check():
        model, _ = _make(fsdp, 0)
        other, _ = _make(fsdp, 1)
        x = torch.randn(4, 5)
        other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=assign)
        assert torch.equal(model(x), other(x))
        for state in other._get_fsdp_state().context.all_states:
            for group in state.groups:
                for i, param in enumerate(group.params):
                    assert param.sharded_param._local_tensor is group.shard.shard(i)

    run_ranks(check, 2)


def test_full_state_dict_of_rank_0_loads_into_a_model_on_meta():
    def check():
        wanted = _model(0)
        with torch.device("meta"):
            model = _model(1)
        _shard(fsdp, model)
        model.to_empty(device="cpu")
        state = wanted.state_dict() if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        x = torch.randn(4, 5)
        torch.testing.assert_close(model(x), wanted(x))

    run_ranks(check, 2)


def test_state_dict_tensors_have_their_own_storage_in_the_groups_memory(tmp_path):
    """`torch.save` writes a shard only, and tensors of a group are not taken for tied ones."""

    def check(path):
        model = fsdp.fully_shard(nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]))
        first, second = model.state_dict(), model.state_dict()
        locals_ = [value.to_local() for value in first.values()]
        storages = [local.untyped_storage() for local in locals_]
        assert [s.nbytes() for s in storages] == [local.nbytes for local in locals_]
        filled = [s.data_ptr() for s in storages if s.nbytes()]
        assert len(set(filled)) == len(filled) > 1
        for name, param in model.named_parameters():
            mine, again = first[name].to_local(), second[name].to_local()
            assert mine.data_ptr() == param.to_local().data_ptr()
            assert mine.untyped_storage()._cdata == again.untyped_storage()._cdata
            mine.fill_(3.0)
            assert bool((param.to_local() == 3.0).all())
        torch.save(locals_[0], f"{path}-{dist.get_rank()}")

    run_ranks(check, 2, str(tmp_path / "local"))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 2000  # 144 bytes, and what torch writes around them
