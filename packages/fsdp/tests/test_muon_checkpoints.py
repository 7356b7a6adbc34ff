"""State dicts of torch.optim.Muon load into Muon, and those of Muon there; training continues."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp import Rows, fully_shard
from fsdp.optim import Muon
from testkit import run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.matrix_net import (
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


def matrices_only():
    """Returns a net of which only the matrices of hidden layers are trained, and these."""
    model = MatrixNet()
    hidden = matrices_of(model)
    names = [name for name, _ in hidden]
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    return model, hidden


KINDS = {"fsdp": Muon, "torch": torch.optim.Muon}


@pytest.mark.parametrize(("saved", "loaded"), [("torch", "fsdp"), ("fsdp", "torch")])
@pytest.mark.parametrize("named", [True, False], ids=["names", "no names"])
def test_plain_state_dicts_are_exchangeable(saved, loaded, named):
    """With the options of the one that is saved, and fsdp's own ones unchanged."""

    def start(kind, **options):
        model, hidden = matrices_only()
        params = hidden if named else [param for _, param in hidden]
        return model, KINDS[kind](params, **options)

    model, optimizer = start(saved, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    train(model, optimizer, 3)
    other, continued = start(loaded, lr=1.0)
    other.load_state_dict(model.state_dict())
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, continued, 4, 3) == train(model, optimizer, 4, 3)
    assert same_bits(full_tensors(other), full_tensors(model)) == []
    assert continued.param_groups[0]["lr"] == 0.02
    own = optimizer if saved == "fsdp" else continued
    assert own.param_groups[0].keys().isdisjoint({"use_muon", "normuon_beta2"})


def test_normuon_starts_from_the_momentum_of_torchs_muon_and_keeps_its_option():
    model, hidden = matrices_only()
    optimizer = torch.optim.Muon(hidden)
    train(model, optimizer, 2)
    other, other_hidden = matrices_only()
    continued = Muon(other_hidden, normuon_beta2=0.9)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, continued, 1, 2)
    assert continued.param_groups[0]["normuon_beta2"] == 0.9
    for (_, param), (_, source) in zip(other_hidden, hidden, strict=True):
        state = continued.state[param]
        assert state.keys() == {"momentum_buffer", "second_momentum_buffer.0"}
        assert optimizer.state[source].keys() == {"momentum_buffer"}


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@pytest.mark.ranks
def test_full_state_dicts_of_one_device_and_of_shards_are_exchangeable():
    """Matrices by Muon and the others by AdamW: two optimizers of torch are one of fsdp."""
    single = MatrixNet()
    references = TorchMuon(single)
    train(single, references, 3)
    saved = copy.deepcopy(
        (get_model_state_dict(single), get_optimizer_state_dict(single, references.both))
    )
    expected = train(single, references, 6, 3)

    def check():
        model = sharded(fully_shard, Rows(3))
        optimizer = optimizer_of(Muon, model)
        first = dist.get_rank() == 0
        set_model_state_dict(model, saved[0] if first else {}, options=SPREAD)
        set_optimizer_state_dict(model, optimizer, saved[1] if first else {}, options=SPREAD)
        losses = train(model, optimizer, 3, 3)
        states = (
            get_model_state_dict(model, options=FULL),
            get_optimizer_state_dict(model, optimizer, options=FULL),
        )
        return losses, states if first else None

    found = run_ranks(check, 2)
    assert [losses for losses, _ in found] == [expected[:3]] * 2
    back = MatrixNet()
    others = TorchMuon(back)
    set_model_state_dict(back, found[0][1][0])
    set_optimizer_state_dict(back, others.both, found[0][1][1])
    assert train(back, others, 3, 6) == expected[3:]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "loaded", "flat"),
    [
        pytest.param("torch", "fsdp", False, id="nested, to fsdp"),
        pytest.param("fsdp", "torch", True, id="flat, to FSDP2"),
        pytest.param("torch", "fsdp", True, id="flat, to fsdp", marks=pytest.mark.slow),
        pytest.param("fsdp", "torch", False, id="nested, to FSDP2", marks=pytest.mark.slow),
    ],
)
def test_distributed_checkpoints_of_fsdp2_with_torchs_muon_are_exchangeable(
    tmp_path, saved, loaded, flat
):
    def start(kind):
        model, hidden = matrices_only()
        if kind == "fsdp":
            fully_shard(model, shard_placement_fn=lambda param: Rows(2))
        else:
            torch_fully_shard(model)
        names = [name for name, _ in hidden]
        params = [(name, param) for name, param in model.named_parameters() if name in names]
        return model, KINDS[kind](params, lr=0.02)

    def momenta(optimizer):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [full_tensor(optimizer.state[param]["momentum_buffer"]) for param in params]

    def save():
        model, optimizer = start(saved)
        train(model, optimizer, 3)
        save_checkpoint(tmp_path, model, optimizer, flat=flat)
        return full_tensors(model), momenta(optimizer)

    def load():
        model, optimizer = start(loaded)
        load_checkpoint(tmp_path, model, optimizer, flat=flat)
        result = full_tensors(model), momenta(optimizer)
        train(model, optimizer, 1, 3)
        return result

    expected, expected_momenta = run_ranks(save, 2)[0]
    for params, found in run_ranks(load, 2):
        assert same_bits(params, expected) == []
        assert len(found) == len(expected_momenta) == 3
        assert all(torch.equal(a, b) for a, b in zip(found, expected_momenta, strict=True))
