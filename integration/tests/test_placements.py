"""``--placements``: the trainer passes fsdp's placements of parameters, gradients and optimizer."""

from typing import get_args

import pytest

import fsdp
from fsdp.state import state_of
from integration.models import build_model, model_shape
from integration.systems import Degrees, Placements, get_system
from integration.train.config import parse_config
from testkit import fake_mesh

FOUR_RANKS = {"system": "plan", "dp_replicate": 2, "dp_shard": 2}


def test_names_are_those_of_fsdp():
    names = {name for names in get_args(Placements) for name in get_args(names)}
    assert names == set(fsdp.STRATEGIES)


def test_the_command_line_gives_them_to_the_system():
    config = parse_config(["--system", "fsdp", "--placements", "zero2"])
    assert config.placements == "zero2"
    assert get_system("fsdp", Degrees(placements="zero2")).degrees.placements == "zero2"


@pytest.mark.parametrize(
    ("system", "degrees", "fractions"),
    [
        ("fsdp", Degrees(placements="ddp"), (1, 1)),
        ("fsdp", Degrees(placements="zero1"), (1 / 4, 1)),
        ("fsdp", Degrees(placements="zero3"), (1 / 4, 1 / 4)),
        ("plan", Degrees(dp_shard=4, placements="zero2"), (1 / 4, 1)),
        ("plan", Degrees(dp_shard=2, tp=2, placements="zero2"), (0.32, 0.64)),  # and embeddings
        ("plan", Degrees(dp_replicate=2, dp_shard=2, placements="hfsdp"), (1 / 4, 1 / 2)),
    ],
)
def test_a_system_places_all_parameters_by_them(system, degrees, fractions):
    """Parts that a rank's optimizer updates, and that are in its memory between steps."""
    shape = model_shape("llama-tiny")
    with fake_mesh((4,)):
        whole = build_model(shape, seed=0)
        elements = sum(param.numel() for param in whole.parameters())
        model = get_system(system, degrees).parallelize(whole, shape, 4)
        states = filter(None, map(state_of, model.modules()))
        assert {group.options.roles for state in states for group in state.groups} == {
            fsdp.STRATEGIES[degrees.placements]
        }
        own = [param.to_local() for param in model.parameters()]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in own}
    updated = sum(one.numel() for one in own)
    resident = sum(storage.nbytes() for storage in storages.values()) // 4
    # Rank 0 has a bit more or less than the others, with blocks of 32 rows.
    assert (updated / elements, resident / elements) == pytest.approx(fractions, rel=0.15)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "base", "names"),
    [
        (2, {"system": "fsdp"}, ["zero1"]),
        pytest.param(2, {"system": "fsdp"}, ["ddp", "zero2", "zero3"], marks=pytest.mark.slow),
        pytest.param(
            2, {"system": "plan", "dp_shard": 2}, ["ddp", "zero1", "zero2", "zero3"],
            marks=pytest.mark.slow,
        ),
        pytest.param(4, FOUR_RANKS, ["hsdp", "hfsdp"], marks=pytest.mark.slow),
    ],
    ids=["fsdp, ZeRO-1", "fsdp, others", "plan", "plan, two axes"],
)  # fmt: skip
def test_losses_have_the_bits_of_a_run_without_them(ranks, base, names, train_runs, tmp_path):
    """In steps of one microbatch; of several, some reduce each and sum in another order."""
    base = base | {"micro_batch": 8 // ranks}
    runs = [base, *(base | {"placements": name} for name in names)]
    wanted, *found = train_runs(ranks, runs, out=tmp_path)
    assert found == [wanted] * len(names)
