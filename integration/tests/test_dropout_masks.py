"""The hash of dropout masks: what it tells apart, and that shards draw one device's masks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from integration.train.measurement.dropout_masks import DropoutMasks
from integration.train.metrics import read_metrics, read_summary
from testkit import run_ranks

ONES = torch.ones(64)


def masks_of(*calls, seed=0):
    """The hash of these calls' masks, drawn from ``seed``."""
    torch.manual_seed(seed)
    with DropoutMasks() as masks:
        for call in calls:
            call()
    return masks.hexdigest()


def test_equal_draws_have_one_hash_and_other_draws_another():
    def call():
        return dropout(ONES, 0.5)

    assert masks_of(call) == masks_of(call)
    assert masks_of(call) != masks_of(call, seed=1)
    assert masks_of(call) != masks_of(call, call)


def test_without_dropout_there_is_no_hash():
    assert masks_of(lambda: ONES * 0) is None


def test_the_shape_belongs_to_a_mask():
    flat, square = masks_of(lambda: dropout(ONES)), masks_of(lambda: dropout(ONES.view(8, 8)))
    assert flat != square


def test_values_do_not_matter_and_zeros_of_the_input_are_not_dropped():
    flat = masks_of(lambda: dropout(ONES))
    assert masks_of(lambda: dropout(-3 * ONES)) == flat
    zeros = ONES.clone()
    zeros[::2] = 0
    assert masks_of(lambda: dropout(zeros)) != flat
    assert masks_of(lambda: dropout(torch.zeros(64)), seed=1) == masks_of(
        lambda: dropout(torch.zeros(64))
    )


def test_a_replaced_function_is_seen_and_so_is_its_call_of_torchs(monkeypatch):
    """plan-api puts functions in place of torch's, which pass on what they do not take."""
    expected = masks_of(lambda: dropout(ONES, 0.5))

    def replaced(*args, **kwargs):
        if torch.overrides.has_torch_function_unary(args[0]):
            return torch.overrides.handle_torch_function(dropout, args[:1], *args, **kwargs)
        return dropout(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "dropout", replaced)
    torch.manual_seed(0)
    with DropoutMasks() as outer, DropoutMasks() as inner:
        nn.Dropout(0.5)(ONES)
    assert outer.hexdigest() == inner.hexdigest() == expected


def test_modules_and_calls_in_place_are_seen_too():
    expected = masks_of(lambda: dropout(ONES, 0.5))
    assert masks_of(lambda: nn.Dropout(0.5)(ONES)) == expected
    assert masks_of(lambda: dropout(ONES.clone(), 0.5, inplace=True)) == expected


def test_results_gradients_and_the_generator_are_as_without():
    def grown(note):
        torch.manual_seed(3)
        source = ONES.clone().requires_grad_()
        with note:
            result = dropout(source, 0.3)
        result.sum().backward()
        return result, source.grad, torch.rand(1)

    noted, plain = grown(DropoutMasks()), grown(torch.enable_grad())
    assert all(map(torch.equal, noted, plain))


def train(out, options):
    """Run the trainer on the ranks of a pool, and put random DTensors back as they were."""
    import torch.distributed as dist

    import dist_rng
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    class Stop:
        requested = False

    size = dist.get_world_size()
    system = "single" if size == 1 else "dtensor-tp"
    common = {"model": "llama-tiny", "steps": 3, "fingerprint": True, "tensorboard": False}
    config = TrainConfig(system=system, out=Path(out), **common, **options)
    try:
        Trainer(prepare(config, size), World(dist.get_rank(), size)).run(Stop())
    finally:
        dist_rng.uninstall()


def trained(out, ranks, **options):
    """What a run on ``ranks`` ranks leaves: its summary and its losses."""
    run_ranks(train, ranks, str(out), options)
    return read_summary(out), torch.tensor([record.loss for record in read_metrics(out)])


# What native DTensor says of itself: it is what is compared with.
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"init": "sharded", "dropout": 0.1},
        pytest.param({"init": "sharded"}, marks=pytest.mark.slow),
        pytest.param({"dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=" and ".join,
)
def test_random_numbers_on_two_ranks_are_those_of_one_device_with_dist_rng_only(options, tmp_path):
    dropped = "dropout" in options
    single, losses = trained(tmp_path / "single", 1, **options)
    with_dist_rng = options | {"random": "dist-rng"}
    dist_rng_run, dist_rng_losses = trained(tmp_path / "dist-rng", 2, **with_dist_rng)
    native, native_losses = trained(tmp_path / "native", 2, **options)
    assert (single.first_masks is not None) == dropped
    assert dist_rng_run.initial_weights == single.initial_weights
    assert dist_rng_run.first_masks == single.first_masks
    assert (dist_rng_losses - losses).abs().max() <= 1e-5
    assert (native.initial_weights != single.initial_weights) == ("init" in options)
    assert (native.first_masks != single.first_masks) == dropped
    assert (native_losses - losses).abs().max() > 1e-5
