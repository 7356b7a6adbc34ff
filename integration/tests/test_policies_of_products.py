"""Every product of parallelism trains in both modes and with every policy that it accepts.

`docs/support/composition.md` has the products and the policies of these tests; the comparison with
one device has the others.
"""

import pytest
import torch.distributed as dist

from integration.models import model_shape
from integration.option_table.policies import CHECKPOINTS, RECOMPUTATION, policies_in_tests
from integration.option_table.products import products
from integration.option_table.trainer.choices import BASE, CHOICES
from integration.pipeline.schedules import SCHEDULES
from testkit import run_ranks

pytestmark = [
    pytest.mark.ranks,
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
    # Its blocks are then of shards, and not those of one device.
    pytest.mark.filterwarnings("ignore:Adam8bit. the shards of parameter"),
]

STEPS = 4
MIDDLE = STEPS // 2
# The product that the fast tier trains.
FAST = "TP x SP"
EVERY = [
    pytest.param(
        product,
        id=f"{product.name}, {product.variant.system}",
        marks=[] if product.name == FAST else [pytest.mark.slow],
    )
    for product in products()
]


@pytest.fixture(scope="module")
def one_device(train_runs, tmp_path_factory):
    """Its losses by the options of its run; a checkpoint is saved in the middle of each."""
    known = {}

    def of(options):
        key = tuple(sorted(options.items()))
        if key not in known:
            out = tmp_path_factory.mktemp("one")
            run = options | {"system": "single", "save_at": MIDDLE}
            (losses,) = train_runs(1, [run], out=out, steps=STEPS)
            known[key] = losses, out / "checkpoints" / f"step-{MIDDLE:08d}"
        return known[key]

    return of


def trainable(options):
    """The options without the number of ranks, which are there already."""
    return {name: value for name, value in options.items() if name != "ranks"}


def difference(losses, expected):
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.slow  # below, the fast tier has each policy in effect
@pytest.mark.parametrize("product", EVERY)
def test_losses_are_those_of_one_device_with_each_policy(product, one_device, train_runs, tmp_path):
    policies = [each for each in policies_in_tests(product) if each is not CHECKPOINTS]
    policies.sort(key=lambda policy: "device" in policy.options)
    runs = [trainable(each.of(product)) for each in policies]
    on_cpu = [run for run in runs if "device" not in run]
    ranks, tolerance = product.variant.ranks, model_shape(product.options["model"]).tolerance
    plain, *found = train_runs(
        ranks, [trainable(product.options), *on_cpu], out=tmp_path, steps=STEPS
    )
    if on_device := runs[len(on_cpu) :]:
        found += train_runs(ranks, on_device, out=tmp_path, steps=STEPS)
    alone, _ = one_device(product.one_device)
    assert difference(plain, alone) <= tolerance
    for policy, losses in zip(policies, found, strict=True):
        if policy is RECOMPUTATION:
            assert losses == plain, policy.name
        else:
            expected, _ = one_device(policy.one_device(product))
            accepted = max(tolerance, policy.tolerance)
            assert difference(losses, expected) <= accepted, policy.name
            # Of one device both have the same bits otherwise; fp16 changes the least.
            assert not policy.alone or difference(expected, alone) > 2e-5, policy.name


def proof_of(policy):
    """The option table's choice with the options of a policy; None if it has none."""
    options = [policy.options, policy.options | {"system": "plan"}]
    return next((choice for choice in CHOICES if choice.options in options), None)


def _observe(options):
    from integration.option_table.trainer.observation import observe
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.session import restore_torch

    restore_torch()  # of another test in the same processes
    return observe(TrainConfig(**options), World(dist.get_rank(), dist.get_world_size()))


@pytest.mark.parametrize("product", EVERY)
@pytest.mark.slow  # the option table proves them for a product
def test_each_policy_is_in_effect(product, tmp_path):
    proved = []
    for number, policy in enumerate(policies_in_tests(product)):
        choice = proof_of(policy)
        if choice is not None:
            options = BASE | policy.of(product) | {"out": tmp_path / str(number)}
            seen = tuple(run_ranks(_observe, product.variant.ranks, options, timeout=120))
            assert choice.proof(seen, options), f"{policy.name} is ignored"
            proved.append(policy)
    assert RECOMPUTATION in proved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {"system": "single"}), (4, {"system": "plan", "tp": 2, "sp": True})],
    ids=["single", "TP x SP"],
)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1F1B"])
def test_recomputation_changes_no_bit_under_other_schedules(
    schedule, ranks, options, train_runs, tmp_path
):
    pipeline = {"micro_batch": 8, "pp_degree": 2, "pp_schedule": schedule, "pp_microbatches": 4}
    runs = [pipeline | options | {"activation_checkpointing": mode} for mode in ("none", "full")]
    losses, recomputed = train_runs(ranks, runs, out=tmp_path, steps=STEPS)
    assert recomputed == losses


@pytest.mark.parametrize("product", EVERY)
def test_one_devices_checkpoint_is_loaded_and_the_other_way(
    product, one_device, train_runs, tmp_path
):
    expected, middle = one_device(product.one_device)
    options = trainable(product.options) | {"resume": str(middle), "save_at": MIDDLE + 1}
    (losses,) = train_runs(
        product.variant.ranks, [options], out=tmp_path / "product", steps=MIDDLE + 1
    )
    later = tmp_path / "product" / "checkpoints" / f"step-{MIDDLE + 1:08d}"
    alone = product.one_device | {"system": "single", "resume": str(later)}
    (rest,) = train_runs(1, [alone], out=tmp_path / "one", steps=STEPS)
    tolerance = model_shape(product.options["model"]).tolerance
    assert difference([*losses, *rest], expected[MIDDLE:]) <= tolerance
