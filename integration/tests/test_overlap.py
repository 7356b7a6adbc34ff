"""Training with --overlap tp: the losses of one device, with sends beside products."""

import pytest

from integration.errors import UsageError
from integration.option_table.trainer.choices import BASE
from integration.train.config import TrainConfig, parse_config
from integration.train.validation import validate
from testkit import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete")

OVERLAP = {"system": "plan", "tp": 2, "overlap": "tp"}


@pytest.mark.ranks
def test_losses_are_those_of_one_device_in_both_modes(train_runs, tmp_path):
    """And the bits of the run without, beside which nothing is in flight."""
    small = {"global_batch": 2}
    (one,) = train_runs(1, [small], out=tmp_path)
    runs = [
        small | OVERLAP | {"sp": True, "static": True},
        small | OVERLAP | {"sp": True},
        small | OVERLAP,
    ]
    unsplit, *losses = train_runs(2, [runs[0] | {"overlap": None}, *runs], out=tmp_path)
    for found in losses:
        assert found == pytest.approx(one, abs=1e-5)
    assert losses[0] == pytest.approx(unsplit, abs=1e-6)


def _overlapped(options):
    import torch.distributed as dist

    from integration.option_table.trainer.observation import observe
    from integration.train.launch.world import World

    seen = observe(TrainConfig(**options), World(dist.get_rank(), dist.get_world_size()))
    return seen.overlapped, seen.collectives.get("send", 0)


@pytest.mark.ranks
def test_activations_are_sent_beside_products(tmp_path):
    """In each of two layers: q, k, v and gate, up, whose input is gathered; o and down."""
    run = BASE | OVERLAP | {"sp": True, "static": True, "ranks": 2, "out": tmp_path}
    # On two ranks a shard is one message. Backward gathers or scatters what forward scatters or
    # gathers, so both send four shards for a layer, of each microbatch of the step.
    microbatches = BASE["global_batch"] // BASE["micro_batch"]
    for transfers, sent in run_ranks(_overlapped, 2, run):
        assert transfers == 2 * 4 * 2 * microbatches
        assert sent > 0


@pytest.mark.ranks
@pytest.mark.slow
def test_products_and_policies_have_the_losses_of_one_device(train_runs, tmp_path):
    base = OVERLAP | {"sp": True}
    products = (
        {"dp_shard": 2},
        {"dp_shard": 2, "static": True, "activation_checkpointing": "full"},
        {"dp_shard": 2, "static": True, "loss_parallel": True},
        {"dp_replicate": 2, "activation_checkpointing": "selective-op"},
        {"cp": 2, "static": True},
    )
    experts = {"model": "mixtral-tiny", "dp_shard": 2, "ep": 2, "static": True}
    (one, of_experts) = train_runs(
        1, [{"micro_batch": 4}, {"micro_batch": 4, "model": "mixtral-tiny"}], out=tmp_path
    )
    losses = train_runs(4, [base | each for each in (*products, experts)], out=tmp_path)
    for product, found in zip(products, losses, strict=False):
        assert found == pytest.approx(one, abs=1e-5), product
    assert losses[-1] == pytest.approx(of_experts, abs=6e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "fsdp", "tp": 1}, "'fsdp' does not take --overlap tp; .* plan"),
        (
            {"system": "torchtitan-style", "sp": True},
            "'torchtitan-style' does not take --overlap tp",
        ),
        ({"tp": 1, "dp_shard": 2}, "--overlap tp: expected --tp of at least 2, got 1; give --tp"),
        ({"dp_shard": 2, "zero3": True}, "--overlap tp: expected no --zero3, which gathers"),
        ({"compile": "aot_eager"}, "--overlap tp: expected --compile none, .* got --compile aot"),
        ({"precision": "mxfp8"}, "--overlap tp: expected --precision none, .* got --precision mx"),
        ({"pp_degree": 2}, "--overlap tp: expected --pp-degree 1, .* got --pp-degree 2"),
        (
            {"sp": True, "sequence_length": 33},
            "--overlap tp: expected --sequence-length to be a multiple of 2, .* 33; .* 32 or 34",
        ),
    ],
    ids=str,
)
def test_it_is_refused_where_nothing_would_overlap(options, message):
    options = {"model": "llama-tiny"} | OVERLAP | options
    ranks = 4 if "dp_shard" in options or "pp_degree" in options else 2
    if options["tp"] == 1:
        ranks = 2
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(**options, ranks=ranks))


def test_an_odd_sequence_without_sequence_parallelism_is_taken():
    """Only rows of sums are split then, in parts of any length."""
    config = TrainConfig(model="llama-tiny", **OVERLAP, sequence_length=33, ranks=2)
    assert validate(config).system.degrees.overlap == "tp"


def test_an_axis_without_overlap_is_no_value():
    with pytest.raises(SystemExit):
        parse_config(["--overlap", "dp"])
