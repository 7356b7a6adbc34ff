"""Options of models with routers: they train as on one device, and what is refused."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from integration.errors import UsageError
from integration.models import ModelShape, model_shape
from integration.train.config import NATIVE_RANDOM, TrainConfig, parse_config
from integration.train.model.expert_bias import update_expert_biases
from integration.train.validation import validate
from testkit import run_ranks

STEPS = 20
SP = {"tp": 2, "sp": True}
PIPELINE = {"pp_degree": 2, "pp_microbatches": 2}
ZERO_BUBBLE = {
    "pp_schedule": "InterleavedZeroBubble", "pp_microbatches": 4,
    "pp_split_points": "model.layers.0,model.layers.1,lm_head",
}  # fmt: skip
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
        "CP with EP": {"cp": 2, "ep": 2},
        "CP, static": {"cp": 2, "static": True},
        "PP": PIPELINE,
        "PP, static": PIPELINE | {"static": True},
        "PP, split backward": PIPELINE | ZERO_BUBBLE,
        "fsdp2": {"system": "fsdp2", "dropout": 0.0, "random": NATIVE_RANDOM},
        "ddp": {"system": "ddp", "dropout": 0.0, "random": NATIVE_RANDOM},
    },
    4: {
        "FSDP x TP + SP": {"dp_shard": 2} | SP,
        "PP x FSDP x EP": PIPELINE | {"dp_shard": 2, "ep": 2},
        "PP x CP with EP": PIPELINE | {"cp": 2, "ep": 2},
        "PP x TP + SP, static": PIPELINE | SP | {"static": True},
        "EP x TP, static": {"dp_replicate": 2, "ep": 2, "tp": 2, "static": True},
    },
}
ROUTERS = {
    "mixtral-tiny": {"router_z_loss": 0.02, "capacity_factor": 0.9},
    "deepseek-v3-tiny": {
        "router_z_loss": 0.02,
        "capacity_factor": 1.0,
        # At 2e-3 two groups of experts have equal scores but for one bit, for a token of step 15.
        "expert_bias_rate": 3e-3,
    },
}


@dataclass(frozen=True)
class Trained:
    """The loss and the norm of the gradients of each step, and the biases after it, by layer."""

    losses: list[float]
    norms: list[float]
    biases: list[dict[int, list[float]]]


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
        losses, norms, biases = [], [], []
        while trainer.step < steps:
            loss = trainer._backward()
            norms.append(trainer._update())
            dist.all_reduce(loss)
            losses.append(loss.item() / world.size)
            biases.append(_biases(trainer))
        found.append(Trained(losses, norms, biases))
    return found


def _biases(trainer):
    """Returns the biases of all ranks' routers, by layer; those of several ranks are equal."""
    own = {
        number: (bias.full_tensor() if isinstance(bias, DTensor) else bias).tolist()
        for number, router in trainer._load.routers.items()
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None
    }
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    merged = {number: bias for of_rank in of_ranks for number, bias in of_rank.items()}
    assert all(merged[number] == bias for one in of_ranks for number, bias in one.items())
    return merged


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
        assert actual.biases == one.biases, name
        if "expert_bias_rate" in options:
            assert all(any(bias) for bias in one.biases[0].values())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "product"),
    [
        pytest.param("mixtral-tiny", "PP", marks=pytest.mark.slow),
        ("deepseek-v3-tiny", "TP + SP with EP, static"),
    ],
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


def test_a_capacity_without_effect_is_refused():
    validate(TrainConfig(model="mixtral-tiny", capacity_factor=1.0))
    with pytest.raises(UsageError, match=r"--capacity-factor 1.0: expected a model with routers"):
        validate(TrainConfig(model="llama-tiny", capacity_factor=1.0))
    with pytest.raises(UsageError, match=r"--capacity-factor 1.0: expected --compile none"):
        validate(TrainConfig(model="mixtral-tiny", capacity_factor=1.0, compile="aot_eager"))


def test_biases_of_routers_without_them_are_refused():
    validate(TrainConfig(model="deepseek-v3-tiny", expert_bias_rate=0.1))
    with pytest.raises(UsageError, match=r"--expert-bias-rate 0.1: .*e_score.*got --model mixtral"):
        validate(TrainConfig(model="mixtral-tiny", expert_bias_rate=0.1))


@pytest.mark.parametrize("option", ["--router-z-loss", "--expert-bias-rate", "--capacity-factor"])
@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_what_is_no_number_from_zero_on_is_refused(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_config([option, value])
    assert option[2:].replace("-", "_") in capsys.readouterr().err


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


@pytest.mark.ranks
def test_biases_are_in_checkpoints(train_runs, tmp_path):
    """A run that is resumed on another product goes on as one that was not stopped."""
    options = {"model": "deepseek-v3-tiny", "expert_bias_rate": 0.01, "micro_batch": 8}
    (expected,) = train_runs(1, [options | {"steps": 4}], out=tmp_path / "one")
    (without,) = train_runs(
        1, [options | {"steps": 4, "expert_bias_rate": 0.0}], out=tmp_path / "without"
    )
    assert abs(expected[3] - without[3]) > 1e-3
    plan = options | {"system": "plan", "out": tmp_path / "run"}
    resumed = plan | {"tp": 2, "sp": True, "ep": 2, "static": True, "resume": "auto", "steps": 4}
    first, then = train_runs(
        2, [plan | {"tp": 2, "steps": 2, "save_at": 2}, resumed],
        out=tmp_path,
    )  # fmt: skip
    assert first + then == pytest.approx(expected, rel=0, abs=6e-5)


class _Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.e_score_correction_bias = nn.Buffer(torch.tensor([0.5, 0.0, 0.0, -1.0]))


@pytest.mark.parametrize(
    ("counts", "moves"),
    [
        ([0, 8, 4, 4], [1, -1, 0, 0]),
        ([16, 0, 0, 0], [-1, 1, 1, 1]),
        ([4, 4, 4, 4], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([4, 4, 4, 5], [1, 1, 1, -1]),
    ],
    ids=["one without tokens", "all on one", "even", "no tokens", "one more"],
)
@pytest.mark.parametrize("copies", [1, 6])
def test_biases_move_by_the_rate_towards_the_mean(counts, moves, copies):
    router, other = _Router(), _Router()
    before = other.e_score_correction_bias.clone()
    rows = torch.tensor([[1, 2, 3, 4, 5], [copies * each for each in counts] + [99]])
    update_expert_biases({1: router}, rows.double(), 0.125)
    assert torch.equal(router.e_score_correction_bias, before + 0.125 * torch.tensor(moves))
    assert torch.equal(other.e_score_correction_bias, before)
