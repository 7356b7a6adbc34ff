"""``--eval-samples``: one device's loss of held-out samples on every product, beside training."""

import functools
import math
from pathlib import Path

import pytest

import integration.data
from integration.data import TextWindows, open_corpus
from integration.data.tokens import ByteStream
from integration.errors import UsageError
from integration.models import build_model, model_shape
from integration.pipeline.schedules import SCHEDULES
from integration.train.checkpoint.checkpoint import load_weights
from integration.train.config import TrainConfig
from integration.train.validation import validate
from testkit import run_ranks

RUN = {
    "model": "llama-tiny",
    "data": Path(integration.data.__file__).parent,
    "steps": 4,
    "global_batch": 8,
    "micro_batch": 2,
    "eval_samples": 16,
    "eval_every": 2,
    "resume": "never",
    "tensorboard": False,
    "final_checkpoint": False,
    "peak_flops": 1e12,
}
DIT = {"model": "dit-tiny", "data": None}
MIXTRAL = {"model": "mixtral-tiny"}
PRODUCTS = {
    "ddp": {"system": "ddp"},
    "fsdp1": {"system": "fsdp1"},
    "fsdp2": {"system": "fsdp2"},
    "fsdp": {"system": "fsdp"},
    "dtensor-tp": {"system": "dtensor-tp"},
    "torchtitan-style": {
        "system": "torchtitan-style", "tp": 2, "sp": True, "loss_parallel": True,
    },
    "plan, FSDP": {"system": "plan", "dp_shard": 2},
    "plan, ZeRO-3 by phases": {"system": "plan", "dp_shard": 2, "zero3": True},
    "plan, TP": {"system": "plan", "tp": 2, "sp": True, "loss_parallel": True},
    "plan, CP": {"system": "plan", "cp": 2},
    "plan, static TP": {"system": "plan", "tp": 2, "sp": True, "static": True},
    "plan, static FSDP": {"system": "plan", "dp_shard": 2, "static": True},
    "plan, EP": {"system": "plan", "dp_shard": 2, "ep": 2} | MIXTRAL,
    "plan, PP": {"system": "plan", "pp_degree": 2},
    "DiT, FSDP": {"system": "fsdp"} | DIT,
    "DiT, plan, TP": {"system": "plan", "tp": 2} | DIT,
    "DiT, PP": {"pp_degree": 2} | DIT,
    "PP, tied": {"pp_degree": 2, "model": "llama-tied-tiny"},
    **{
        f"PP, {name}": {"pp_degree": 2, "pp_schedule": name, "micro_batch": 8}
        for name in SCHEDULES
    },
}  # fmt: skip
FAST = ("fsdp", "plan, TP", "plan, PP")
ON_FOUR_RANKS = {
    "PP x FSDP": {"system": "fsdp", "pp_degree": 2},
    "PP x FSDP2": {"system": "fsdp2", "pp_degree": 2},
    "PP x TP": {"system": "plan", "pp_degree": 2, "tp": 2},
    "FSDP x TP": {"system": "plan", "dp_shard": 2, "tp": 2, "sp": True},
}


def _run(runs):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.metrics import read_metrics
    from integration.train.session import restore_torch
    from integration.train.setup import prepare
    from integration.train.stop import StopRequest

    world, found = World(dist.get_rank(), dist.get_world_size()), []
    for options in runs:
        restore_torch()
        config = TrainConfig(**options)
        trainer = Trainer(prepare(config, world.size), world)
        assert trainer.run(StopRequest())
        assert all(module.training for module in trainer.model.modules())
        if config.system in ("fsdp", "fsdp2"):
            parameters = list(trainer.model.parameters())
            assert all(isinstance(each, DTensor) for each in parameters), "not sharded again"
        dist.barrier()
        found.append(read_metrics(config.out))
    return found


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Returns the records of runs, by name, on some ranks."""

    def metrics(ranks, runs):
        out = tmp_path_factory.mktemp("runs")
        options = [RUN | run | {"out": out / str(n)} for n, run in enumerate(runs.values())]
        first, *_ = run_ranks(_run, ranks, options, timeout=300)
        return dict(zip(runs, first, strict=True))

    return metrics


@pytest.fixture(scope="module")
def one_device(metrics):
    """Returns the records of one device by the model."""

    @functools.cache
    def records(model):
        (found,) = metrics(1, {model: DIT if model == "dit-tiny" else {"model": model}}).values()
        return found

    return records


def check(product, records, one_device):
    model = product.get("model", "llama-tiny")
    tolerance = 6e-5 if model == "mixtral-tiny" else 1e-5
    for record, expected in zip(records, one_device(model), strict=True):
        assert (record.eval_loss is None) == (record.step % 2 == 1)
        assert record.loss == pytest.approx(expected.loss, rel=0, abs=tolerance)
        if record.eval_loss is not None:
            assert record.eval_loss == pytest.approx(expected.eval_loss, rel=0, abs=tolerance)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PRODUCTS],
)
def test_the_loss_of_held_out_samples_is_one_devices(name, metrics, one_device):
    check(PRODUCTS[name], metrics(2, {name: PRODUCTS[name]})[name], one_device)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_the_loss_of_held_out_samples_is_one_devices_on_four_ranks(name, metrics, one_device):
    check(ON_FOUR_RANKS[name], metrics(4, {name: ON_FOUR_RANKS[name]})[name], one_device)


def test_the_loss_is_that_of_the_trained_model_on_the_samples_it_was_not_trained_on(tmp_path):
    """Computed here from the checkpoint, sample by sample."""

    def train():
        config = TrainConfig(**RUN | {"out": tmp_path, "final_checkpoint": True, "dropout": 0.3})
        return _run_one(config)

    (summary, records), *_ = run_ranks(train, 1)
    model = build_model(model_shape("llama-tiny"), seed=1).eval()
    load_weights(tmp_path / "checkpoints" / "step-00000004", model.state_dict())
    corpus = open_corpus(RUN["data"])
    windows = TextWindows(ByteStream(corpus), 64, source="", size=0, fingerprint="")
    every = len(windows) // 16
    losses = []
    for slot in range(16):
        sample = windows.sample((slot + 1) * every - 1, 0)
        batch = {name: each[None] for name, each in sample.items()}
        losses.append(model(**batch).loss.item())
    assert records[-1].eval_loss == pytest.approx(sum(losses) / 16, rel=0, abs=1e-6)
    assert records[-1].eval_perplexity == pytest.approx(math.exp(records[-1].eval_loss))
    assert summary.eval_loss == records[-1].eval_loss
    assert summary.eval_perplexity == records[-1].eval_perplexity


def _run_one(config):
    import torch.distributed as dist

    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.metrics import read_metrics, read_summary
    from integration.train.setup import prepare
    from integration.train.stop import StopRequest

    world = World(dist.get_rank(), dist.get_world_size())
    assert Trainer(prepare(config, world.size), world).run(StopRequest())
    dist.barrier()
    return read_summary(config.out), read_metrics(config.out)


DRAWS = {
    "one device": (1, {"system": "single"}),
    "PP": (2, {"pp_degree": 2}),
    "PP, one device's masks": (2, {"pp_degree": 2, "random": "dist-rng"}),
    "static TP": (2, {"system": "plan", "tp": 2, "static": True, "random": "dist-rng"}),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("PP", "static TP")))
        for name in DRAWS
    ],
)
def test_training_with_dropout_has_the_same_bits_with_and_without_evaluations(name, metrics):
    ranks, product = DRAWS[name]
    product = product | {"dropout": 0.2}
    runs = {every: product | {"eval_every": every} for every in (1, 0)}
    with_every, at_the_end = metrics(ranks, runs).values()
    assert [each.loss for each in with_every] == [each.loss for each in at_the_end]
    assert [each.eval_loss for each in at_the_end[:-1]] == [None] * 3
    assert with_every[-1].eval_loss == at_the_end[-1].eval_loss
    assert len({each.eval_loss for each in with_every}) == 4


@pytest.mark.ranks
@pytest.mark.parametrize(
    "system", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp1", "fsdp2"))]
)
def test_a_checkpoint_after_an_evaluation_resumes_with_the_same_bits(system, metrics, tmp_path):
    run = {"system": system, "checkpoint_every": 2}
    (records,) = metrics(2, {0: run}).values()

    def resume(out):
        config = TrainConfig(**RUN | run | {"out": out, "resume": str(checkpoint)})
        return _run_one(config)

    one = RUN | run | {"out": tmp_path / "first", "steps": 2}
    run_ranks(_run, 2, [one])
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000002"
    (_, resumed), *_ = run_ranks(resume, 2, tmp_path / "second")
    assert [(each.loss, each.eval_loss) for each in resumed] == [
        (each.loss, each.eval_loss) for each in records[2:]
    ]


@pytest.mark.ranks
def test_a_run_with_other_held_out_samples_does_not_resume(tmp_path):
    def resume():
        _run_one(TrainConfig(**RUN | {"out": tmp_path, "final_checkpoint": True}))
        changed = {"resume": "auto", "eval_samples": 8, "steps": 5}
        with pytest.raises(UsageError, match=r"another run: eval_samples: expected 8, .* got 16"):
            _run_one(TrainConfig(**RUN | {"out": tmp_path} | changed))

    run_ranks(resume, 1)


def test_images_have_an_evaluation_loss_and_no_perplexity(one_device):
    losses = [each.eval_loss for each in one_device("dit-tiny")]
    assert losses[3] < losses[1]
    assert {each.eval_perplexity for each in one_device("dit-tiny")} == {None}


def test_a_finished_run_that_is_started_again_has_the_evaluation_in_its_summary(tmp_path):
    def again():
        config = TrainConfig(**RUN | {"out": tmp_path, "final_checkpoint": True})
        first, _ = _run_one(config)
        return first, _run_one(TrainConfig(**RUN | {"out": tmp_path, "resume": "auto"}))[0]

    ((first, second),) = run_ranks(again, 1)
    assert second.eval_loss == first.eval_loss is not None


def test_samples_that_a_step_of_training_could_not_have_are_refused():
    def refuse(message, **options):
        with pytest.raises(UsageError, match=message):
            validate(TrainConfig(**RUN | options))

    refuse(r"--eval-samples 12: expected a multiple of --global-batch", eval_samples=12)
    refuse(r"--eval-every 2: expected --eval-samples of at least", eval_samples=0)
    refuse(r"'deepspeed' does not take --eval-samples", system="deepspeed", eval_every=0)
