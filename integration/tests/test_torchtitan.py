"""TorchTitan's way on an unmodified model: one device's losses, and what it is refused."""

import pytest

from integration.errors import UsageError
from integration.systems import Degrees
from integration.train.config import TrainConfig
from integration.train.setup import prepare

STEPS = 5
TITAN = {"system": "torchtitan-style", "tensorboard": False}
WAYS = {
    "TP + SP": Degrees(tp=2, sp=True),
    "TP + SP, loss parallel": Degrees(tp=2, sp=True, loss_parallel=True),
    "FSDP": Degrees(dp_shard=2),
    "HSDP": Degrees(dp_replicate=2, dp_shard=2),
    "FSDP x TP + SP, loss parallel": Degrees(dp_shard=2, tp=2, sp=True, loss_parallel=True),
}


@pytest.fixture(scope="module")
def one_device(train_runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    (losses,) = train_runs(1, [{}], out=out, steps=STEPS)
    assert losses[0] - losses[-1] > 0.1, "the comparison is empty"
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_its_ways_train_as_one_device(ranks, one_device, train_runs, tmp_path):
    # Several microbatches make a step.
    ways = {name: way for name, way in WAYS.items() if way.data * way.tp == ranks}
    runs = [TITAN | vars(way) for way in ways.values()]
    found = train_runs(ranks, runs, out=tmp_path, steps=STEPS)
    for name, losses in zip(ways, found, strict=True):
        assert losses == pytest.approx(one_device, abs=1e-5, rel=0), name


@pytest.mark.ranks
def test_it_trains_in_processes_in_which_a_plan_did(one_device, train_runs, tmp_path):
    # As runs of the comparison do: the packages that a plan switches on stay on.
    way = vars(WAYS["TP + SP, loss parallel"])
    runs = [way | {"system": "plan"}, way | TITAN]
    for losses in train_runs(2, runs, out=tmp_path, steps=STEPS):
        assert losses == pytest.approx(one_device, abs=1e-5, rel=0)


@pytest.mark.ranks
def test_clipping_and_weights_drawn_on_shards(train_runs, tmp_path):
    clipped = {"clip_grad_norm": 0.5, "init": "sharded", "random": "dist-rng"}
    free = {"init": "sharded", "random": "dist-rng"}
    expected, unclipped = train_runs(1, [clipped, free], out=tmp_path, steps=STEPS)
    way = TITAN | vars(WAYS["FSDP x TP + SP, loss parallel"])
    (losses,) = train_runs(4, [way | clipped], out=tmp_path, steps=STEPS)
    far = max(abs(one - other) for one, other in zip(expected, unclipped, strict=True))
    assert far > 1e-3, "nothing was clipped"
    assert losses == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.ranks
@pytest.mark.parametrize("system", ["single", "plan"])
def test_others_resume_its_checkpoint(system, one_device, train_runs, tmp_path):
    way = TITAN | vars(WAYS["FSDP x TP + SP, loss parallel"])
    train_runs(4, [way | {"save_at": 3}], out=tmp_path, steps=STEPS)
    (path,) = (tmp_path / "checkpoints").glob("step-*3")
    resumed = {"resume": str(path), "system": system}
    if system == "plan":
        resumed |= {"tp": 2, "sp": True}
    (losses,) = train_runs(2 if system == "plan" else 1, [resumed], out=tmp_path, steps=STEPS)
    assert losses == pytest.approx(one_device[3:], abs=1e-5, rel=0)


@pytest.mark.parametrize(
    ("ranks", "options", "sentence"),
    [
        (2, {"tp": 2}, "cuts sequences wherever it cuts weights, by one plan; give --sp beside"),
        (2, {"dp_replicate": 2}, "copies parameters along --dp-replicate 2 beside --dp-shard only"),
        (2, {"cp": 2}, "system 'torchtitan-style' does not take --cp 2; leave it out, or use"),
        (2, {"dp_shard": 2, "static": True}, "does not take --static; leave it out, or use"),
        (4, {"dp_shard": 2, "sp": True, "tp": 1}, "makes 2 ranks and there are 4"),
        (3, {"tp": 3, "sp": True}, "3 ranks do not divide num_attention_heads = 4"),
        (2, {"tp": 2, "sp": True, "sequence_length": 33}, "--sequence-length is 33; give a multip"),
        (2, {"tp": 2, "sp": True, "model": "dit-tiny"}, "has no plan for model 'dit-tiny'"),
        (2, {"tp": 2, "sp": True, "pp_degree": 2}, "does not go with --pp-degree; use one of"),
    ],
    ids=["no sp", "copies", "cp", "static", "ranks", "heads", "sequence", "model", "pipeline"],
)
def test_what_it_does_not_have_is_refused_by_one_sentence(ranks, options, sentence, tmp_path):
    config = TrainConfig(**{"model": "llama-tiny", "out": tmp_path / "run"} | TITAN | options)
    with pytest.raises(UsageError, match=sentence) as refused:
        prepare(config, ranks)
    assert "\n" not in str(refused.value)
