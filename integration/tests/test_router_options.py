"""Options of models with routers: they train as on one device, and what is refused."""

from dataclasses import dataclass

import pytest
import torch.distributed as dist

from integration.errors import UsageError
from integration.models import ModelShape, model_shape
from integration.train.config import TrainConfig, parse_config
from integration.train.validation import validate
from testkit import run_ranks

STEPS = 20
SP = {"tp": 2, "sp": True}
PIPELINE = {"pp_degree": 2, "pp_microbatches": 2}
PRODUCTS = {
    2: {
        "EP": {"dp_replicate": 2, "ep": 2},
        "EP, static": {"dp_replicate": 2, "ep": 2, "static": True},
        "TP + SP": SP,
        "TP + SP with EP": SP | {"ep": 2},
        "TP + SP with EP, static": SP | {"ep": 2, "static": True},
        "TP + SP, static": SP | {"static": True},
        "FSDP x EP, recomputed": {"dp_shard": 2, "ep": 2, "activation_checkpointing": "full"},
        "FSDP, static": {"dp_shard": 2, "static": True},
        "PP": PIPELINE,
        "PP, static": PIPELINE | {"static": True},
        "fsdp2": {"system": "fsdp2", "dropout": 0.0, "random": "stock"},
        "ddp": {"system": "ddp", "dropout": 0.0, "random": "stock"},
    },
    4: {
        "FSDP x TP + SP": {"dp_shard": 2} | SP,
        "PP x FSDP x EP": PIPELINE | {"dp_shard": 2, "ep": 2},
        "PP x TP + SP, static": PIPELINE | SP | {"static": True},
        "EP x TP, static": {"dp_replicate": 2, "ep": 2, "tp": 2, "static": True},
    },
}
ROUTERS = {"mixtral-tiny": {"router_z_loss": 0.02}, "deepseek-v3-tiny": {"router_z_loss": 0.02}}


@dataclass(frozen=True)
class Trained:
    """The loss and the norm of the gradients of each step."""

    losses: list[float]
    norms: list[float]


def _options(model, product):
    """Returns the options of a run; all data parallel ranks together have 8 samples in each."""
    data = product.get("dp_replicate", 1) * product.get("dp_shard", 1)
    if "system" in product:
        data = 2
    common = {"system": "plan", "model": model, "init": "sharded"} | ROUTERS[model]
    common |= {"dropout": 0.1, "random": "dist-rng", "micro_batch": 8 // data}
    return common | product | ({"init": "whole"} if "system" in product else {})


def _of_one_device(run):
    """Returns the options whose dropout masks are those of a run, of microbatches of 8 samples."""
    own = {"micro_batch": 8 // run.get("pp_microbatches", 1), "dropout": run["dropout"]}
    return {"model": run["model"]} | own | ROUTERS[run["model"]]


def _train(runs, steps):
    import dtensor_rules
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    world = World(dist.get_rank(), dist.get_world_size())
    if world.size > 1:  # on all ranks alike, whatever tests the processes have had
        dtensor_rules.enable()
    found = []
    for options in runs:
        config = TrainConfig(**{"clip_grad_norm": 1.0, "steps": steps} | options)
        trainer = Trainer(prepare(config, world.size), world)
        losses, norms = [], []
        while trainer.step < steps:
            loss = trainer._backward()
            norms.append(trainer._update())
            dist.all_reduce(loss)
            losses.append(loss.item() / world.size)
        found.append(Trained(losses, norms))
    return found


def _compare(model, ranks, names, steps, out):
    """Compares runs of some products with those of one device."""
    shared = {"out": out, "resume": "never"}
    runs = [shared | _options(model, PRODUCTS[ranks][name]) for name in names]
    ones = [shared | _of_one_device(run) for run in runs]
    alone = [one for number, one in enumerate(ones) if one not in ones[:number]]
    expected = run_ranks(_train, 1, alone, steps, timeout=240)[0]
    found = run_ranks(_train, ranks, runs, steps, timeout=480)[0]
    tolerance = model_shape(model).tolerance
    for name, options, actual in zip(names, ones, found, strict=True):
        one = expected[alone.index(options)]
        assert one.losses[0] - one.losses[-1] > 0.01, "the comparison is empty"
        assert actual.losses == pytest.approx(one.losses, rel=0, abs=tolerance), name
        assert actual.norms == pytest.approx(one.norms, rel=0, abs=tolerance), name


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "product"),
    [("mixtral-tiny", "PP"), ("deepseek-v3-tiny", "TP + SP with EP, static")],
)
def test_a_product_on_two_ranks_trains_as_one_device(model, product, tmp_path):
    _compare(model, 2, [product], 5, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("model", ROUTERS)
def test_all_products_on_two_ranks_train_as_one_device(model, tmp_path):
    _compare(model, 2, [*PRODUCTS[2]], STEPS, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("model", ROUTERS)
def test_all_products_on_four_ranks_train_as_one_device(model, tmp_path):
    _compare(model, 4, [*PRODUCTS[4]], STEPS, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "llama-tiny"}, r"--router-z-loss 0.1: expected a model with routers.*llama-tin"),
        ({"system": "fsdp1", "ranks": 2}, r"expected one of the systems single.*got fsdp1"),
        ({"compile": "aot_eager"}, r"expected --compile none, got aot_eager"),
    ],
    ids=["model", "system", "compile"],
)
def test_where_the_z_loss_has_no_effect_it_is_refused(options, message):
    run = {"model": "mixtral-tiny", "router_z_loss": 0.1}
    validate(TrainConfig(**run))
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(**run | options))


@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_a_coefficient_that_is_no_number_from_zero_on_is_refused(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--router-z-loss", value])
    assert "router_z_loss" in capsys.readouterr().err


@dataclass(frozen=True)
class _Own(ModelShape):
    """A model whose class is not known."""

    family = "own"
    tensor_parallel_sizes = ()

    def build(self, *, dropout):
        raise AssertionError


def test_a_model_of_ones_own_says_whether_it_has_routers():
    assert not _Own().has_routers
    assert model_shape("mixtral-tiny").has_routers
    assert not model_shape("dit-tiny").has_routers
