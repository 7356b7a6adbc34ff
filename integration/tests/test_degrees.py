"""Products of parallelism by a plan: every model trains as one device does."""

from functools import cache

import pytest
import torch

from integration.models import model_shape
from integration.systems import Degrees
from testkit import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 5
MODELS = ["llama-tiny", "mixtral-tiny", "dit-tiny"]
PRODUCTS = {
    "DP": Degrees(dp_replicate=2),
    "FSDP": Degrees(dp_shard=2),
    "TP, static": Degrees(tp=2, static=True),
    "HSDP": Degrees(dp_replicate=2, dp_shard=2),
    "FSDP x TP": Degrees(dp_shard=2, tp=2),
    "DP x TP + SP": Degrees(dp_replicate=2, tp=2, sp=True),
}


def losses(model, out, **options):
    """The mean loss of each step, as all ranks know it."""
    from pathlib import Path

    import torch.distributed as dist

    from integration.train.config import TrainConfig
    from integration.train.loop import Trainer
    from integration.train.setup import prepare
    from integration.train.world import World

    world = World(dist.get_rank(), dist.get_world_size())
    config = TrainConfig(
        model=model, out=Path(out), steps=STEPS, resume="never", dropout=0.1, **options
    )
    trainer = Trainer(prepare(config, world.size), world)
    found = []
    for _ in range(STEPS):
        loss = trainer.train_step()
        dist.all_reduce(loss)
        found.append(loss.item() / world.size)
    return found


@cache
def one_device(model, out):
    """Its losses: whole weights, and dropout as torch draws it."""
    (found,) = run_ranks(losses, 1, model, out)
    assert found[0] - found[-1] > 0.02, "the model does not learn: the comparison is empty"
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder that nothing is written to."""
    return str(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_product_trains_as_one_device_with_weights_drawn_on_shards_and_dropout(
    model, product, out
):
    degrees = PRODUCTS[product]
    ranks = degrees.dp_replicate * degrees.dp_shard * degrees.tp
    options = vars(degrees) | {"system": "plan", "init": "sharded"}
    expected = one_device(model, out)
    for found in run_ranks(lambda: losses(model, out, **options), ranks, timeout=180):
        difference = (torch.tensor(found, dtype=torch.float64) - expected).abs().max()
        assert difference <= model_shape(model).tolerance
