"""Training with --send-dtype: fewer bytes of gradients, and losses near those without."""

import pytest
import torch.distributed as dist

from integration.errors import UsageError
from integration.systems import SYSTEM_NAMES, get_system
from integration.train.config import TrainConfig
from integration.train.validation import validate
from testkit import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete")

NARROW = ("bfloat16", "float8")
# Of the losses of three steps, from those without. Measured: 1.4e-5 and 3.5e-4.
TOLERANCES = {"bfloat16": 1e-4, "float8": 1e-3}


@pytest.mark.ranks
def test_losses_are_near_those_without_and_alike_in_both_systems(train_runs, tmp_path):
    layouts = (
        {"system": "fsdp"},
        {"system": "plan", "dp_shard": 2},
        {"system": "plan", "dp_shard": 2, "static": True, "placements": "zero2"},
    )
    runs = [one | {"send_dtype": dtype} for dtype in (None, *NARROW) for one in layouts]
    losses = train_runs(2, runs, out=tmp_path)
    without = losses[0]
    for number, dtype in enumerate(NARROW, 1):
        first, *others = losses[3 * number : 3 * number + 3]
        for each in others:  # gradients that differ in the last bits may be rounded apart
            assert each == pytest.approx(first, abs=TOLERANCES[dtype]), dtype
        assert first == pytest.approx(without, abs=TOLERANCES[dtype]), dtype
        assert first[1:] != without[1:], dtype


@pytest.mark.ranks
@pytest.mark.slow
def test_products_and_policies_have_losses_near_those_without(train_runs, tmp_path):
    plan = {"system": "plan", "dp_shard": 2}
    products = (
        plan | {"dp_replicate": 2},
        plan | {"tp": 2, "sp": True, "static": True, "overlap": "tp"},
        plan | {"cp": 2, "dtype": "bf16"},
        {"system": "fsdp", "pp_degree": 2, "micro_batch": 4},
        plan | {"pp_degree": 2, "micro_batch": 4, "static": True},
        plan | {"model": "mixtral-tiny", "dp_replicate": 2, "ep": 2},
    )
    for number, product in enumerate(products):
        runs = [product | {"send_dtype": dtype} for dtype in (None, *NARROW)]
        without, *narrow = train_runs(4, runs, out=tmp_path / str(number))
        for dtype, losses in zip(NARROW, narrow, strict=True):
            assert losses == pytest.approx(without, abs=TOLERANCES[dtype]), product
            assert losses[1:] != without[1:], product


def _gradient_bytes(runs):
    """The bytes of the first step of each run, by the kind of collective and its dtype."""
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare
    from testkit import CommLog

    world, found = World(dist.get_rank(), dist.get_world_size()), []
    for options in runs:
        trainer = Trainer(prepare(TrainConfig(**options), world.size), world)
        with CommLog() as log:
            trainer.train_step()
        of_run = {}
        for call in log.calls:
            key = call.op, call.dtype
            of_run[key] = of_run.get(key, 0) + call.input_bytes
        found.append(of_run)
    return found


@pytest.mark.ranks
def test_gradients_are_sent_in_half_and_in_a_quarter_of_the_bytes(tmp_path):
    base = {"model": "llama-tiny", "system": "fsdp", "micro_batch": 2, "resume": "never"}
    runs = [base | {"send_dtype": dtype, "out": tmp_path} for dtype in (None, *NARROW)]
    for without, in_bfloat16, in_float8 in run_ranks(_gradient_bytes, 2, runs):
        assert not any(op == "all_to_all" for op, _ in without)
        # fsdp's strategy for gloo sends each rank its part: half of a buffer, on two ranks. An
        # all-to-all has the whole of it as its input, of which half stays on the rank.
        kinds = {kind for run in (without, in_bfloat16, in_float8) for kind in run}
        saved = {
            kind: without.get(kind, 0) - in_bfloat16.get(kind, 0)
            for kind in kinds
            if kind[0] != "all_to_all"
        }
        of_gradients = sum(saved.values())
        assert of_gradients > 0
        sent = in_bfloat16["all_to_all", "bfloat16"] / 2
        assert sent == pytest.approx(of_gradients / 2)
        sent = in_float8["all_to_all", "uint8"] / 2
        assert of_gradients / 4 < sent < 0.27 * of_gradients


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_systems_that_do_not_send_narrow_terms_are_refused(system):
    degrees = {"dp_shard": 2} if get_system(system).accepts_degrees else {}
    ranks = 1 if system == "single" else 2
    config = TrainConfig(
        model="llama-tiny", system=system, ranks=ranks, send_dtype="float8", **degrees
    )
    if get_system(system).accepts_send_dtype:
        assert validate(config).system.degrees.send_dtype == "float8"
        return
    with pytest.raises(UsageError, match=r"does not take .*--send-dtype float8"):
        validate(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"system": "plan", "tp": 2},
            "--send-dtype bfloat16: expected --dp-shard of at least 2 .* got --dp-shard 1;",
        ),
        (
            {"system": "plan", "dp_shard": 2, "zero3": True},
            "--send-dtype bfloat16: expected .* without --zero3",
        ),
        (
            {"system": "fsdp", "ranks": 1},
            "--send-dtype bfloat16: expected at least 2 ranks, .* got 1",
        ),
        ({"system": "ddp"}, "'ddp' does not take --send-dtype bfloat16; .* one of: fsdp, plan"),
    ],
    ids=str,
)
def test_it_is_refused_where_fsdp_sends_no_gradients(options, message):
    options = {"model": "llama-tiny", "ranks": 2, "send_dtype": "bfloat16"} | options
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(**options))
