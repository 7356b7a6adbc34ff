"""TorchTitan's way on an unmodified model: one device's losses, and what it is refused."""

import pytest

from integration.errors import UsageError
from integration.systems import Degrees
from integration.train.config import TrainConfig
from integration.train.setup import prepare

STEPS = 5
TITAN = {"system": "torchtitan-style", "tensorboard": False}
STRATEGIES = {
    "TP + SP": Degrees(tp=2, sp=True),
    "TP + SP, loss parallel": Degrees(tp=2, sp=True, loss_parallel=True),
    "FSDP": Degrees(dp_shard=2),
    "HSDP": Degrees(dp_replicate=2, dp_shard=2),
    "FSDP x TP + SP, loss parallel": Degrees(dp_shard=2, tp=2, sp=True, loss_parallel=True),
}


TEXT_ONLY = {"tp": 2, "sp": True, "loss_parallel": True, "model": "dit-tiny"}
MODELS = ("llama-tiny", "mixtral-tiny", "dit-tiny")


def product(model):
    # FSDP warns of logits that are views, and whole ones of a cut output are.
    return TITAN | vars(Degrees(dp_shard=2, tp=2, sp=True, loss_parallel=model != "dit-tiny"))


@pytest.fixture(scope="module")
def one_device(train_runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    found = train_runs(1, [{"model": model} for model in MODELS], out=out, steps=STEPS)
    losses = dict(zip(MODELS, found, strict=True))
    assert all(run[0] - run[-1] > 0.05 for run in found), "the comparison is empty"
    return losses


def near(losses):
    return pytest.approx(losses, abs=1e-5, rel=0)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_its_ways_train_as_one_device(ranks, one_device, train_runs, tmp_path):
    # Several microbatches make a step.
    ways = {
        (model, name): TITAN | vars(way) | {"model": model}
        for name, way in STRATEGIES.items()
        for model in MODELS
        if way.data * way.tp == ranks and not (way.loss_parallel and model == "dit-tiny")
    }
    found = train_runs(ranks, list(ways.values()), out=tmp_path, steps=STEPS)
    for (model, name), losses in zip(ways, found, strict=True):
        assert losses == near(one_device[model]), (model, name)


@pytest.mark.slow
@pytest.mark.ranks
def test_it_trains_in_processes_in_which_a_plan_did(one_device, train_runs, tmp_path):
    # As runs of the comparison do: the packages that a plan switches on stay on.
    way = vars(STRATEGIES["TP + SP"])
    runs = [way | {"model": model} | who for model in MODELS for who in ({"system": "plan"}, TITAN)]
    found = train_runs(2, runs, out=tmp_path, steps=STEPS)
    for run, losses in zip(runs, found, strict=True):
        assert losses == near(one_device[run["model"]]), run


@pytest.mark.slow
@pytest.mark.ranks
def test_clipping_and_weights_drawn_on_shards(train_runs, tmp_path):
    models = [{"model": model} for model in MODELS[:2]]
    drawn = {"init": "sharded"}
    clipped = drawn | {"clip_grad_norm": 0.5}
    runs = [options | model for options in (clipped, drawn) for model in models]
    *expected, llama, mixtral = train_runs(1, runs, out=tmp_path, steps=STEPS)
    for each, unclipped in zip(expected, (llama, mixtral), strict=True):
        far = max(abs(one - other) for one, other in zip(each, unclipped, strict=True))
        assert far > 1e-3, "nothing was clipped"
    runs = [product(run["model"]) | clipped | {"random": "dist-rng"} | run for run in models]
    for one, losses in zip(expected, train_runs(4, runs, out=tmp_path, steps=STEPS), strict=True):
        assert losses == near(one)


@pytest.mark.slow
@pytest.mark.ranks
def test_others_resume_its_checkpoints(one_device, train_runs, tmp_path):
    runs = [{"model": model, "save_at": 3, "out": tmp_path / model} for model in MODELS]
    train_runs(4, [product(run["model"]) | run for run in runs], out=tmp_path, steps=STEPS)
    saved = {
        model: {"model": model, "resume": str(*(tmp_path / model / "checkpoints").glob("step-*3"))}
        for model in MODELS
    }
    alone = train_runs(1, list(saved.values()), out=tmp_path, steps=STEPS)
    way = {"system": "plan", "tp": 2, "sp": True}
    planned = train_runs(2, [way | run for run in saved.values()], out=tmp_path, steps=STEPS)
    for model, single, plan in zip(MODELS, alone, planned, strict=True):
        assert single == near(one_device[model][3:]), model
        assert plan == near(one_device[model][3:]), model


@pytest.mark.parametrize(
    ("ranks", "options", "sentence"),
    [
        (2, {"tp": 2}, "expected --sp with --tp 2"),
        (2, {"dp_replicate": 2}, "expected --dp-shard with --dp-replicate 2"),
        (2, {"cp": 2}, "system 'torchtitan-style' does not take --cp 2; leave it out, or use"),
        (2, {"dp_shard": 2, "static": True}, "does not take --static; leave it out, or use"),
        (4, {"dp_shard": 2, "sp": True, "tp": 1}, "number of ranks, 4, got 2"),
        (
            3,
            {"tp": 3, "sp": True},
            "--tp 3: expected a divisor of num_attention_heads = 4, got 3; --tp 1",
        ),
        (
            2,
            {"tp": 2, "sp": True, "sequence_length": 33},
            "--sequence-length to be a multiple of --tp 2, .* --sequence-length 32 or 34 would fit",
        ),
        (
            3,
            {"tp": 3, "sp": True, "model": "dit-tiny"},
            "--tp 3: expected a divisor of hidden_size = 32",
        ),
        (2, TEXT_ONLY, "--loss-parallel: expected a model with logits"),
        (2, {"tp": 2, "sp": True, "pp_degree": 2}, "does not support --pp-degree; use one of"),
    ],
    ids=[
        "no sp",
        "copies",
        "cp",
        "static",
        "ranks",
        "heads",
        "sequence",
        "width",
        "loss",
        "pipeline",
    ],
)
def test_what_it_does_not_have_is_refused_by_one_sentence(ranks, options, sentence, tmp_path):
    config = TrainConfig(**{"model": "llama-tiny", "out": tmp_path / "run"} | TITAN | options)
    with pytest.raises(UsageError, match=sentence) as refused:
        prepare(config, ranks)
    assert "\n" not in str(refused.value)
