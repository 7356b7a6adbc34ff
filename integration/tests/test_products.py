"""Products of parallelism train as one device does, and shard parameters over all that shards."""

import pytest

from integration.models import model_shape
from integration.systems import Degrees
from testkit import run_ranks

pytestmark = [
    pytest.mark.ranks,
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
]

# Some steps are clipped and some are not, so that a factor of all gradients changes losses, too.
COMMON = {"global_batch": 8, "clip_grad_norm": 2.4, "init": "sharded"}
DROPOUT = {"dropout": 0.1, "random": "dist-rng"}

LLAMA, MIXTRAL = {"model": "llama-tiny"} | DROPOUT, {"model": "mixtral-tiny"} | DROPOUT
SP = {"tp": 2, "sp": True}
# The options of a product of two kinds on four ranks, and of three on eight.
PRODUCTS = {
    "FSDP x CP": LLAMA | {"dp_shard": 2, "cp": 2},
    "FSDP x CP, ZeRO-2": LLAMA | {"dp_shard": 2, "cp": 2, "placements": "zero2"},
    "FSDP x CP, static": LLAMA | {"dp_shard": 2, "cp": 2, "static": True},
    "HSDP x EP": MIXTRAL | {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "FSDP x CP with EP of both": MIXTRAL | {"dp_shard": 2, "cp": 2, "ep": 4},
    "FSDP x CP with EP of FSDP": MIXTRAL | {"dp_shard": 2, "cp": 2, "ep": 2},
    "FSDP x EP": MIXTRAL | {"dp_shard": 4, "ep": 2},
    "FSDP x CP x TP + SP, loss": LLAMA | {"dp_shard": 2, "cp": 2, "loss_parallel": True} | SP,
    "FSDP x CP x TP + SP, static": LLAMA | {"dp_shard": 2, "cp": 2, "static": True} | SP,
    "HSDP x CP": LLAMA | {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    "DP x CP x TP + SP": LLAMA | {"dp_replicate": 2, "cp": 2} | SP,
    "HSDP x TP + SP": LLAMA | {"dp_replicate": 2, "dp_shard": 2} | SP,
    "FSDP x EP x TP": MIXTRAL | {"dp_shard": 4, "ep": 2, "tp": 2},
    "HSDP x EP of some": MIXTRAL | {"dp_replicate": 2, "dp_shard": 4, "ep": 2},
    "HSDP x EP x TP": MIXTRAL | {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "tp": 2},
    "FSDP x TP with EP + SP": MIXTRAL | {"dp_shard": 2, "ep": 4, "tp": 4, "sp": True},
}
# Of 4 heads three ranks have 2, 2 and none; hidden sizes are uneven, too.
UNEVEN = {
    "TP of 3, LLaMA": LLAMA | {"tp": 3, "static": True},
    "TP of 3, Mixtral": MIXTRAL | {"tp": 3, "static": True},
    "TP of 3, DiT": {"model": "dit-tiny", "tp": 3, "static": True} | DROPOUT,
}
FAST = ("HSDP x EP",)


def _degrees(product):
    names = Degrees.__dataclass_fields__
    options = (PRODUCTS | UNEVEN)[product]
    return Degrees(**{name: size for name, size in options.items() if name in names})


def _ranks(product):
    degrees = _degrees(product)
    return degrees.data * degrees.cp * degrees.tp


def _options(product):
    """Returns the options of a run, in which all data parallel ranks have 4 samples or more."""
    data = _degrees(product).data
    options = COMMON | (PRODUCTS | UNEVEN)[product]
    return options | {"system": "plan", "micro_batch": max(4, data) // data}


def _local_numel(options):
    """Returns a rank's elements of each parameter, and those of all."""
    import torch.distributed as dist

    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    world = World(dist.get_rank(), dist.get_world_size())
    model = Trainer(prepare(TrainConfig(**options), world.size), world).model
    return {name: (p.to_local().numel(), p.numel()) for name, p in model.named_parameters()}


def _cases(products):
    """In the fast tier is a product on four ranks, with a mesh of its own for experts."""
    return [
        pytest.param(product, marks=[] if product in FAST else [pytest.mark.slow])
        for product in products
    ]


@pytest.mark.parametrize("product", _cases(PRODUCTS | UNEVEN))
def test_losses_are_those_of_one_device(product, train_runs, tmp_path):
    options, data = _options(product), _degrees(product).data
    steps = 5 if product in FAST else 20
    # One device's dropout masks are of as many samples as the data parallel ranks have together.
    one = {name: options[name] for name in ("model", "global_batch", "clip_grad_norm")}
    one |= {"micro_batch": data * options["micro_batch"], "dropout": options.get("dropout", 0.0)}
    (alone,) = train_runs(1, [one], out=tmp_path / "one", steps=steps)
    (losses,) = train_runs(_ranks(product), [options], out=tmp_path / "all", steps=steps)
    tolerance = model_shape(options["model"]).tolerance
    assert losses == pytest.approx(alone, rel=0, abs=tolerance)


@pytest.mark.parametrize("product", _cases(p for p in PRODUCTS if "ZeRO" not in p))
def test_parameters_have_one_copy_for_each_replica(product, tmp_path):
    """And one for each rank of TP, of those that it does not shard."""
    options, degrees = _options(product) | {"out": tmp_path}, _degrees(product)
    found = run_ranks(_local_numel, _ranks(product), options, timeout=120)
    # Without FSDP context parallel ranks have replicas, too.
    replicas = degrees.dp_replicate * (1 if degrees.dp_shard > 1 else degrees.cp)
    for name, (_, numel) in found[0].items():
        copies = sum(rank[name][0] for rank in found) / numel
        is_matrix = "_proj" in name
        assert copies in ({replicas} if is_matrix else {replicas, replicas * degrees.tp}), name
    of_ranks = [sum(local for local, _ in rank.values()) for rank in found]
    assert max(of_ranks) < 1.25 * sum(of_ranks) / len(of_ranks)
