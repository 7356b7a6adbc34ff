"""Checkpoints of runs that shard sequences continue under any other product, and the other way."""

import functools

import pytest

from integration.models import model_shape

pytestmark = [
    pytest.mark.ranks,
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
]

# Steps of a run under each product, which the next one continues.
STEPS, MOST_RUNS = 2, 3
# Some steps are clipped.
COMMON = {"global_batch": 8, "micro_batch": 2, "clip_grad_norm": 1.0}
ONE, FSDP = (1, {"system": "single"}), (2, {"system": "fsdp"})


def plan(ranks, **options):
    return ranks, {"system": "plan"} | options


CP, STATIC = plan(2, cp=2), plan(2, cp=2, static=True)
TP = plan(2, tp=2, sp=True)
# By its name, runs of which each continues the one before: numbers of ranks, and options.
FAST = {
    "CP, one device": [CP, ONE],
}
SLOW = {
    "FSDP, CP by Ulysses": [FSDP, plan(2, cp=2, cp_method="ulysses")],
    "static CP, TP, CP": [STATIC, TP, CP],
    "one device, CP by all-gather, FSDP": [ONE, plan(2, cp=2, cp_method="all-gather"), FSDP],
    "CP x TP, FSDP x CP, one device": [
        plan(4, cp=2, tp=2, sp=True, loss_parallel=True), plan(4, dp_shard=2, cp=2), ONE,
    ],
    "FSDP x CP, static CP x TP, CP of 4": [
        plan(4, dp_shard=2, cp=2, placements="zero2"), plan(4, cp=2, tp=2, static=True),
        plan(4, cp=4),
    ],
    "HSDP, DP x CP, static FSDP x CP": [
        plan(4, dp_replicate=2, dp_shard=2), plan(4, dp_replicate=2, cp=2),
        plan(4, dp_shard=2, cp=2, static=True),
    ],
    "PP x CP, CP": [plan(4, pp_degree=2, pp_microbatches=2, cp=2), CP],
}  # fmt: skip
OF_EXPERTS = {
    "CP with EP, one device, static CP": [plan(2, cp=2, ep=2), ONE, STATIC],
    "FSDP x CP with EP of both, CP x TP": [
        plan(4, dp_shard=2, cp=2, ep=4), plan(4, cp=2, ep=2, tp=2),
    ],
}  # fmt: skip


def continued(chain, train_runs, out, **common):
    """Returns the losses of all runs of a chain; each saves where it ends."""
    losses, checkpoint = [], "never"
    for number, (ranks, options) in enumerate(chain, start=1):
        folder, last = out / str(number), STEPS * number
        run = common | options | {"resume": checkpoint, "steps": last, "save_at": last}
        losses += train_runs(ranks, [run], out=folder)[0]
        checkpoint = str(folder / "checkpoints" / f"step-{last:08d}")
    return losses


@pytest.fixture(scope="module")
def one_device(train_runs, tmp_path_factory):
    """Returns the losses of one device, as many as a chain has, by its model."""

    @functools.cache
    def losses(model):
        out, steps = tmp_path_factory.mktemp("one_device"), STEPS * MOST_RUNS
        (found,) = train_runs(1, [COMMON | {"model": model}], out=out, steps=steps)
        assert found[0] - found[-1] > 0.02, "the comparison is empty"
        return found

    return losses


def check_chain(chain, model, one_device, train_runs, out):
    losses = continued(chain, train_runs, out, model=model, **COMMON)
    expected = one_device(model)[: len(losses)]
    assert len(losses) == STEPS * len(chain)
    assert losses == pytest.approx(expected, rel=0, abs=model_shape(model).tolerance)


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_chain_of_products_has_the_losses_of_one_device(name, one_device, train_runs, tmp_path):
    check_chain((FAST | SLOW)[name], "llama-tiny", one_device, train_runs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_chain_with_experts_has_the_losses_of_one_device(name, one_device, train_runs, tmp_path):
    check_chain(OF_EXPERTS[name], "mixtral-tiny", one_device, train_runs, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "products"),
    [
        pytest.param(2, [{"cp": 2}, {"cp": 2, "static": True}], marks=pytest.mark.slow),
        pytest.param(
            4,
            [
                {"cp": 2, "tp": 2, "sp": True},
                {"dp_shard": 2, "cp": 2},
                {"dp_shard": 2, "cp": 2, "static": True},
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two ranks", "four ranks"],
)
def test_the_same_product_continues_with_the_same_bits(ranks, products, train_runs, tmp_path):
    """With dropout, whose generators are in the checkpoint, and moments of AdamW."""
    shared = {"system": "plan", "dropout": 0.1, "random": "dist-rng", "micro_batch": 2}
    runs = []
    for number, product in enumerate(products):
        out = tmp_path / str(number)
        run = shared | product | {"out": out}
        path = out / "checkpoints" / f"step-{STEPS:08d}"
        runs += [run | {"save_at": STEPS}, run | {"resume": str(path)}]
    found = train_runs(ranks, runs, out=tmp_path, steps=2 * STEPS)
    for product, straight, resumed in zip(products, found[::2], found[1::2], strict=True):
        assert resumed == straight[STEPS:], product
