"""Every model of the zoo trains as one device does: losses and gradient norms, with dropout."""

from dataclasses import dataclass

import pytest
import torch.distributed as dist

from integration.models import ExpertsShape, model_shape
from integration.systems import Degrees
from testkit import run_ranks

pytestmark = [
    pytest.mark.ranks,
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
]

MODELS = ("qwen3-tiny", "gemma3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "deepseek-v3-tiny")
STEPS = 20
SP = {"tp": 2, "sp": True}
# Options of the products of every model, by their numbers of ranks.
PRODUCTS = {
    2: {
        "FSDP": {"dp_shard": 2},
        "TP": {"tp": 2, "loss_parallel": True},
        "TP + SP, static": SP | {"static": True},
        "PP": {"pp_degree": 2, "pp_microbatches": 2},
    },
    4: {
        "FSDP x TP + SP": {"dp_shard": 2} | SP,
        "FSDP x TP, static": {"dp_shard": 2, "tp": 2, "static": True},
        "DP x TP + SP": {"dp_replicate": 2} | SP,
        "PP x TP + SP, static": {"pp_degree": 2, "pp_microbatches": 2, "static": True} | SP,
    },
    8: {
        "HSDP x TP + SP": {"dp_replicate": 2, "dp_shard": 2} | SP,
        "FSDP x TP + SP, static": {"dp_shard": 4, "static": True} | SP,
        "PP x FSDP x TP": {"pp_degree": 2, "pp_microbatches": 2, "dp_shard": 2, "tp": 2},
    },
}
# Tokens are sent in parts, and in backward not again.
CHUNKS = {"ep_chunks": 3, "activation_checkpointing": "keep-dispatch"}
OF_EXPERTS = {
    2: {
        "FSDP x EP": {"dp_shard": 2, "ep": 2},
        "FSDP x EP in chunks": {"dp_shard": 2, "ep": 2} | CHUNKS,
        "TP + SP with EP in chunks, static": SP | {"ep": 2, "static": True} | CHUNKS,
        "EP, static": {"dp_replicate": 2, "ep": 2, "static": True},
        "TP with EP": {"tp": 2, "ep": 2},
        "TP + SP with EP": SP | {"ep": 2},
    },
    4: {
        "FSDP x EP of some": {"dp_shard": 4, "ep": 2},
        "EP x TP, static": {"dp_replicate": 2, "ep": 2, "tp": 2, "static": True},
        "PP x FSDP x EP": {"pp_degree": 2, "pp_microbatches": 2, "dp_shard": 2, "ep": 2},
        "PP x EP in chunks": {
            "pp_degree": 2, "pp_microbatches": 2, "dp_replicate": 2, "ep": 2,
        } | CHUNKS,
    },
    8: {"FSDP x EP x TP": {"dp_shard": 4, "ep": 2, "tp": 2}},
}  # fmt: skip
# Products that shard sequences.
SHARDING_SEQUENCES = (*MODELS, "llama-tiny", "mixtral-tiny", "dit-tiny")
OF_CONTEXT = {
    2: {
        "CP": {"cp": 2},
        "CP by Ulysses, recomputed": {
            "cp": 2, "cp_method": "ulysses", "activation_checkpointing": "full",
        },
        "CP by all-gather, static": {"cp": 2, "cp_method": "all-gather", "static": True},
    },
    4: {
        "FSDP x CP": {"dp_shard": 2, "cp": 2},
        "CP by Ulysses in a ring": {"cp": 4, "cp_method": "ulysses-ring:2"},
        "PP x CP, static": {"pp_degree": 2, "pp_microbatches": 2, "cp": 2, "static": True},
        "CP x TP + SP, static": SP | {"cp": 2, "static": True},
    },
}  # fmt: skip
# A DiT has none beside sp.
OF_CONTEXT_AND_PATCHES = {
    2: {},
    4: {"CP x TP": {"cp": 2, "tp": 2}, "CP x TP, static": {"cp": 2, "tp": 2, "static": True}},
}
OF_CONTEXT_AND_EXPERTS = {
    2: {"CP with EP": {"cp": 2, "ep": 2}},
    4: {
        "FSDP x CP with EP of both": {"dp_shard": 2, "cp": 2, "ep": 4},
        "FSDP x CP with EP of FSDP, static": {"dp_shard": 2, "cp": 2, "ep": 2, "static": True},
        "DP x CP with EP of both": {"dp_replicate": 2, "cp": 2, "ep": 4},
        "CP with EP x TP + SP": SP | {"cp": 2, "ep": 2},
        "PP x CP with EP": {"pp_degree": 2, "pp_microbatches": 2, "cp": 2, "ep": 2},
    },
}
FAST = {
    "qwen3-tiny": "FSDP",
    "gemma3-tiny": "TP + SP, static",
    "qwen3-moe-tiny": "TP + SP with EP",
    "gpt-oss-tiny": "FSDP x EP in chunks",
    "deepseek-v3-tiny": "TP + SP, static",
}


@dataclass(frozen=True)
class Trained:
    """The loss and the norm of the gradients of each step."""

    losses: list[float]
    norms: list[float]


def _products(model, ranks):
    """Returns the options of a model's products on so many ranks."""
    found = PRODUCTS[ranks]
    return found | OF_EXPERTS[ranks] if isinstance(model_shape(model), ExpertsShape) else found


def _products_of_context(model, ranks):
    """Returns the options of a model's products that shard sequences."""
    found = OF_CONTEXT[ranks]
    if isinstance(model_shape(model), ExpertsShape):
        found = found | OF_CONTEXT_AND_EXPERTS[ranks]
    if model != "dit-tiny":
        return found
    found = {name: options for name, options in found.items() if "sp" not in options}
    return found | OF_CONTEXT_AND_PATCHES[ranks]


def _options(model, product):
    """Returns the options of a run; all data parallel ranks together have 8 samples in each."""
    names = Degrees.__dataclass_fields__
    degrees = Degrees(**{name: size for name, size in product.items() if name in names})
    dropout = {"dropout": 0.1, "random": "dist-rng"}
    common = {"system": "plan", "model": model, "init": "sharded"} | dropout
    return common | {"micro_batch": 8 // degrees.data} | product


def _of_one_device(run):
    """Returns the options whose dropout masks are those of a run, of microbatches of 8 samples."""
    return {"micro_batch": 8 // run.get("pp_microbatches", 1), "dropout": run["dropout"]}


def _train(runs, steps):
    import dtensor_rules
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    world = World(dist.get_rank(), dist.get_world_size())
    if world.size > 1:  # on all ranks alike, whatever tests the processes have had
        dtensor_rules.enable()
    found = []
    for options in runs:
        # Most steps are clipped, and the norm is that of the whole gradient.
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


def _compare(model, ranks, products, steps, out):
    """Compares runs of products with those of one device."""
    shared = {"out": out, "resume": "never"}
    runs = [shared | _options(model, options) for options in products.values()]
    ones = [shared | {"model": model} | _of_one_device(run) for run in runs]
    alone = [one for number, one in enumerate(ones) if one not in ones[:number]]
    expected = run_ranks(_train, 1, alone, steps, timeout=240)[0]
    found = run_ranks(_train, ranks, runs, steps, timeout=480)[0]
    tolerance = model_shape(model).tolerance
    for name, options, actual in zip(products, ones, found, strict=True):
        one = expected[alone.index(options)]
        assert one.losses[0] - one.losses[-1] > 0.02, "the comparison is empty"
        assert actual.losses == pytest.approx(one.losses, rel=0, abs=tolerance), name
        assert actual.norms == pytest.approx(one.norms, rel=0, abs=tolerance), name


@pytest.mark.parametrize(
    "model",
    [
        # The others of the fast tier have their layers' kinds: windows, experts and latents.
        pytest.param(model, marks=[pytest.mark.slow] * (model in ("qwen3-tiny", "qwen3-moe-tiny")))
        for model in MODELS
    ],
)
def test_a_product_on_two_ranks_trains_as_one_device(model, tmp_path):
    _compare(model, 2, {FAST[model]: _products(model, 2)[FAST[model]]}, 5, tmp_path)


def test_sharded_sequences_and_experts_train_as_one_device(tmp_path):
    _compare("mixtral-tiny", 2, OF_CONTEXT_AND_EXPERTS[2], 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", SHARDING_SEQUENCES)
def test_products_with_sharded_sequences_train_as_one_device(model, ranks, tmp_path):
    _compare(model, ranks, _products_of_context(model, ranks), STEPS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_products_train_as_one_device(model, ranks, tmp_path):
    """At least three products on each number of ranks."""
    _compare(model, ranks, _products(model, ranks), STEPS, tmp_path)
