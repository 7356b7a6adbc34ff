"""SOAP resumes from checkpoints at other numbers of ranks and other granularities."""

import copy

import pytest
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import SOAP
from testkit import run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.matrix_net import MatrixNet, optimizer_of, sharded, train

OPTIONS = {"block_size": 8, "precondition_frequency": 3}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "saved_as", "loaded", "loaded_as", "steps_before", "flat"),
    [
        pytest.param(4, Block(1), 1, Rows(3), 0, False, marks=pytest.mark.slow),
        pytest.param(4, Rows(3), 2, Whole(), 2, False, marks=pytest.mark.slow),
        pytest.param(2, Whole(), 4, Block(1), 0, True, marks=pytest.mark.slow),
        (2, Whole(), 1, Block(1), 0, True),
    ],
)
def test_training_resumes_at_another_number_of_ranks(
    tmp_path, saved, saved_as, loaded, loaded_as, steps_before, flat
):
    def save():
        model = sharded(fully_shard, saved_as)
        optimizer = optimizer_of(SOAP, model, **OPTIONS)
        train(model, optimizer, 5)
        save_checkpoint(tmp_path, model, optimizer, flat=flat)
        return train(model, optimizer, 8, 5)

    def load():
        model = sharded(fully_shard, loaded_as)
        optimizer = optimizer_of(SOAP, model, **OPTIONS)
        train(model, optimizer, steps_before)  # state that loading overwrites
        load_checkpoint(tmp_path, model, optimizer, flat=flat)
        return train(model, optimizer, 8, 5)

    expected = run_ranks(save, saved)[0]
    for losses in run_ranks(load, loaded):
        assert losses == expected


@pytest.mark.ranks
def test_full_state_dict_has_every_block_and_loads_on_one_device():
    """`full_state_dict` gathers the state of the optimizer on one device."""
    full = StateDictOptions(full_state_dict=True)

    def save():
        model = sharded(fully_shard, Rows(3))
        optimizer = optimizer_of(SOAP, model, **OPTIONS)
        train(model, optimizer, 5)
        found = (
            get_model_state_dict(model, options=full),
            get_optimizer_state_dict(model, optimizer, options=full),
        )
        found = copy.deepcopy(found)  # an owner's tensors are its state itself
        return found, train(model, optimizer, 8, 5)

    (weights, state), expected = run_ranks(save, 2)[0]
    model = MatrixNet()
    model.load_state_dict(weights)
    optimizer = optimizer_of(SOAP, model, **OPTIONS)
    set_optimizer_state_dict(model, optimizer, state)
    assert train(model, optimizer, 8, 5) == expected
