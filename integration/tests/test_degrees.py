"""Products of parallelism by a plan: every model trains as one device does."""

import pytest

from integration.models import model_shape
from integration.systems import Degrees
from integration.systems.zoo import plan_of
from testkit import fake_mesh

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
FAST = [("llama-tiny", "FSDP x TP"), ("mixtral-tiny", "TP, static")]


# Enough samples for four data parallel ranks; dropout in all runs.
COMMON = {"micro_batch": 4, "dropout": 0.1}


@pytest.fixture(scope="module")
def one_device(train_runs, tmp_path_factory):
    """Its losses by model: whole weights, and dropout as torch draws it."""
    out, known = tmp_path_factory.mktemp("one"), {}

    def of(model):
        if model not in known:
            (known[model],) = train_runs(1, [COMMON | {"model": model}], out=out, steps=STEPS)
            assert known[model][0] - known[model][-1] > 0.02, "the comparison is empty"
        return known[model]

    return of


def _case(model, product):
    """A model's product; in the fast tier is one of each model."""
    marks = [] if (model, product) in FAST else [pytest.mark.slow]
    return pytest.param(model, product, id=f"{model}-{product}", marks=marks)


@pytest.mark.parametrize(
    ("model", "product"), [_case(model, product) for model in MODELS for product in PRODUCTS]
)
def test_a_product_trains_as_one_device_with_weights_drawn_on_shards_and_dropout(
    model, product, one_device, train_runs, tmp_path
):
    degrees = PRODUCTS[product]
    options = COMMON | vars(degrees) | {"model": model, "system": "plan", "init": "sharded"}
    # One device's masks are of 4 samples, which the data parallel ranks have together.
    options |= {"micro_batch": COMMON["micro_batch"] // degrees.data}
    (losses,) = train_runs(degrees.data * degrees.tp, [options], out=tmp_path, steps=STEPS)
    assert losses == pytest.approx(one_device(model), abs=model_shape(model).tolerance, rel=0)


@pytest.mark.parametrize("model", ["llama-tiny", "dit-tiny"])
def test_groups_of_ulysses_are_those_of_the_plan(model):
    """Training on four ranks is in test_zoo_models.py."""
    degrees = Degrees(cp=4, cp_method="ulysses-ring:2")
    with fake_mesh((4,), ("cp",)) as mesh:
        plan = plan_of(model_shape(model), mesh, degrees)
    (context,) = (entry for entry in plan.entries if entry.kind.value == "context")
    assert dict(context.options)["ulysses_degree"] == degrees.ulysses_degree == 2
