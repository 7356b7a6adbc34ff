"""A pipeline trains as one device does, whatever the schedule and whatever goes on in a stage."""

from unittest import mock

import pytest
import torch

from integration.models import model_shape
from integration.pipeline.schedules import SCHEDULES
from testkit import run_ranks

STEPS = 8
MODELS = ("llama-tiny", "mixtral-tiny", "dit-tiny")
FAST_OF_TWO = [("1F1B", "llama-tiny"), ("ZBVZeroBubble", "llama-tiny"), ("1F1B", "dit-tiny")]


@pytest.fixture(scope="module")
def run_all(train_runs):
    """Trains several runs on the same gloo ranks; returns the losses of all steps of each."""

    def run_all(out, ranks, runs):
        runs = [{"micro_batch": 4} | options for options in runs]
        found = train_runs(ranks, runs, out=out, steps=STEPS)
        return [torch.tensor(losses, dtype=torch.float64) for losses in found]

    return run_all


@pytest.fixture(scope="module")
def run(run_all):
    """Trains on gloo ranks; returns the losses of all steps."""

    def run(out, ranks, **options):
        (losses,) = run_all(out, ranks, [options])
        return losses

    return run


@pytest.fixture(scope="module")
def single(run, tmp_path_factory):
    """The losses of one device, by model and further options."""
    known = {}

    def of(model, **options):
        key = (model, *sorted(options.items()))
        if key not in known:
            known[key] = run(tmp_path_factory.mktemp("single"), 1, model=model, **options)
            assert known[key][0] - known[key][-1] > 0.05, "the comparison is empty"
        return known[key]

    return of


def assert_near(losses, expected, model="llama-tiny"):
    assert (losses - expected).abs().max() <= model_shape(model).tolerance


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        pytest.param(name, model, marks=() if (name, model) in FAST_OF_TWO else pytest.mark.slow)
        for name in SCHEDULES
        for model in MODELS
    ],
)
def test_two_ranks_train_as_one_device(schedule, model, single, run_all, tmp_path):
    run = {"pp_degree": 2, "pp_schedule": schedule, "pp_microbatches": 4, "model": model}
    # By a plan, too, of one rank in a stage.
    for losses in run_all(tmp_path, 2, [run, run | {"system": "plan"}]):
        assert_near(losses, single(model), model)


# What goes on within the stages of 2 x 2 ranks.
WITHIN = {
    "ddp": {"system": "ddp"},
    "fsdp2": {"system": "fsdp2"},
    "fsdp": {"system": "fsdp"},
    "dtensor-tp": {"system": "dtensor-tp"},
    "tp": {"system": "plan", "tp": 2, "sp": True, "loss_parallel": True},
    "tp, static": {"system": "plan", "tp": 2, "sp": True, "static": True},
    "dp": {"system": "plan", "dp_replicate": 2},
    "fsdp by plan": {"system": "plan", "dp_shard": 2},
    "fsdp by plan, static": {"system": "plan", "dp_shard": 2, "static": True},
    "zero3": {"system": "plan", "dp_shard": 2, "zero3": True},
    "cp": {"system": "plan", "cp": 2},
    "cp, static": {"system": "plan", "cp": 2, "static": True},
    "ep": {"system": "plan", "dp_shard": 2, "ep": 2, "model": "mixtral-tiny"},
    "ep, static": {
        "system": "plan", "dp_shard": 2, "ep": 2, "model": "mixtral-tiny", "static": True
    },
    "dit, fsdp": {"system": "fsdp", "model": "dit-tiny"},
    "dit, tp": {"system": "plan", "tp": 2, "sp": True, "model": "dit-tiny"},
    "dit, fsdp by plan, static": {
        "system": "plan", "dp_shard": 2, "model": "dit-tiny", "static": True
    },
}  # fmt: skip
# The fast tests train these.
FAST = ("dp", "fsdp by plan", "tp, static")
# Some steps are clipped by this and some are not: AdamW alone hides factors of a gradient.
CLIPPED = {"clip_grad_norm": 1.0}


def train_within(run_all, single, out, names, **options):
    common = {"model": "llama-tiny", "pp_degree": 2} | CLIPPED | options
    runs = [common | WITHIN[name] for name in names]
    for name, run, losses in zip(names, runs, run_all(out, 4, runs), strict=True):
        difference = (losses - single(run["model"], **CLIPPED)).abs().max()
        assert difference <= model_shape(run["model"]).tolerance, name


@pytest.mark.ranks
@pytest.mark.slow
def test_two_stages_of_two_ranks_train_as_one_device(single, run_all, tmp_path):
    train_within(run_all, single, tmp_path, FAST, pp_microbatches=2, micro_batch=2)


def _misplaced(options):
    """The names of parameters whose gradients are placed otherwise after a step's backward."""
    import torch.distributed as dist

    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    world = World(dist.get_rank(), dist.get_world_size())
    trainer = Trainer(prepare(TrainConfig(**options), world.size), world)
    trainer._backward()
    params = list(trainer.model.named_parameters())
    assert params
    return [name for name, param in params if param.grad.placements != param.placements]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("dp", "1F1B"),
        ("tp, static", "ZBVZeroBubble"),
        ("zero3", "1F1B"),
        *(
            pytest.param(name, schedule, marks=pytest.mark.slow)
            for name, schedule in (
                ("dp", "ZBVZeroBubble"),
                ("tp, static", "1F1B"),
                ("tp", "1F1B"),
                ("tp", "ZBVZeroBubble"),
                ("zero3", "ZBVZeroBubble"),
            )
        ),
    ],
)
def test_gradients_of_plans_are_reduced_behind_the_schedule(name, schedule, tmp_path):
    """Else clipping and the optimizer would do it, one by one, with the same losses."""
    options = {"model": "llama-tiny", "pp_degree": 2, "pp_schedule": schedule, "out": tmp_path}
    options |= {"micro_batch": 4, "pp_microbatches": 4} | WITHIN[name]
    assert run_ranks(_misplaced, 4, options, timeout=120) == [[]] * 4


def _clipped(options):
    """Norms before and after clipping, one by one and on buffers, and the number of tensors."""
    import torch.distributed as dist

    from integration.systems.clip import clip_gradients
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    world = World(dist.get_rank(), dist.get_world_size())
    setup = prepare(TrainConfig(**options), world.size)
    trainer = Trainer(setup, world)
    trainer._backward()
    params, group = list(trainer.model.parameters()), setup.system._running.group
    one_by_one = clip_gradients(params, float("inf"), group)
    with mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as scale:
        norm = setup.system.clip(trainer.model, float(one_by_one) / 2)
    after = clip_gradients(params, float("inf"), group)
    [call] = scale.call_args_list
    return one_by_one.item(), norm.item(), after.item(), len(call.args[0]) / len(params)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fsdp", "fsdp by plan"])
def test_gradients_of_a_stage_are_clipped_on_the_buffers_of_groups(name, tmp_path):
    """With the numbers of torch's functions, one by one."""
    options = {"model": "llama-tiny", "pp_degree": 2, "out": tmp_path, "micro_batch": 4}
    found = run_ranks(_clipped, 4, options | WITHIN[name], timeout=120)
    for one_by_one, norm, after, tensors in found:
        assert norm == pytest.approx(one_by_one, rel=1e-6)
        assert after == pytest.approx(norm / 2, rel=1e-5)
        assert tensors < 0.5


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_system_trains_under_every_schedule(schedule, single, run_all, tmp_path):
    options = {"pp_schedule": schedule, "pp_microbatches": 4}
    train_within(run_all, single, tmp_path, list(WITHIN), **options)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("points", ["model.layers.0,model.layers.1,model.norm", "lm_head"])
@pytest.mark.parametrize("static", [False, True])
def test_stages_without_layers_train_under_sequence_parallelism(
    points, static, single, run, tmp_path
):
    options = {"tp": 2, "sp": True, "loss_parallel": True, "static": static}
    if "," in points:
        options |= {"pp_schedule": "Interleaved1F1B"}
    losses = run(
        tmp_path, 4, system="plan", model="llama-tiny", pp_degree=2, pp_split_points=points,
        **options,
    )  # fmt: skip
    assert_near(losses, single("llama-tiny"))


TIED = {"model": "llama-tied-tiny", "pp_degree": 2} | CLIPPED


@pytest.mark.ranks
def test_tied_embeddings_on_two_stages_train_as_one_matrix(single, run_all, tmp_path):
    """Their gradient counts once in the norm; a checkpoint of one device has their name."""
    expected = single("llama-tied-tiny", **CLIPPED)
    assert (expected - single("llama-tied-tiny")).abs().max() > 1e-3, "nothing was clipped"
    (alone,) = run_all(tmp_path, 1, [{**TIED, "pp_degree": 1, "save_at": 4}])
    middle = {"resume": str(tmp_path / "checkpoints" / "step-00000004")}
    runs = [TIED, TIED | {"pp_schedule": "Interleaved1F1B"}, TIED | middle]
    *whole, rest = run_all(tmp_path / "pipeline", 2, runs)
    for losses in whole:
        assert_near(losses, expected)
    assert_near(rest, alone[4:])


@pytest.mark.ranks
@pytest.mark.slow
def test_tied_embeddings_train_under_every_system(single, run_all, tmp_path):
    expected = single("llama-tied-tiny", **CLIPPED)
    names = [name for name in WITHIN if "model" not in WITHIN[name] and "cp" not in WITHIN[name]]
    runs = [WITHIN[name] | TIED | {"pp_schedule": "InterleavedZeroBubble"} for name in names]
    found = run_all(tmp_path, 4, [run | {"pp_microbatches": 4} for run in runs])
    for name, losses in zip(names, found, strict=True):
        assert (losses - expected).abs().max() <= 1e-5, name


# Masks and weights of one device, which runs the same samples at a time as the pipeline.
RANDOM = {"dropout": 0.1, "random": "dist-rng"}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_draws_the_numbers_of_one_device(schedule, single, run_all, tmp_path):
    """Bit for bit: on one device the same operators run on the same numbers."""
    options = RANDOM | {"pp_degree": 2, "pp_schedule": schedule, "pp_microbatches": 4}
    found = run_all(tmp_path, 2, [options | {"model": model} for model in MODELS])
    for model, losses in zip(MODELS, found, strict=True):
        assert torch.equal(losses, single(model, dropout=0.1, micro_batch=1)), model


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_stages_of_plans_draw_the_numbers_of_one_device(static, single, run_all, tmp_path):
    common = RANDOM | {
        "system": "plan", "static": static, "pp_degree": 2, "init": "sharded",
        "pp_schedule": "Interleaved1F1B",
    }  # fmt: skip
    runs = [
        common | {"model": model} | options
        for model in MODELS
        for options in ({"tp": 2, "sp": True}, {"dp_shard": 2, "micro_batch": 4})
    ]
    for options, losses in zip(runs, run_all(tmp_path, 4, runs), strict=True):
        model, samples = options["model"], 2 if "dp_shard" in options else 1
        assert_near(losses, single(model, dropout=0.1, micro_batch=samples), model)


@pytest.mark.ranks
def test_four_stages_of_one_rank_train_as_one_device(single, run, tmp_path):
    losses = run(tmp_path, 4, model="llama-tiny", pp_degree=4, pp_microbatches=4)
    expected = single("llama-tiny")
    assert_near(losses, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_clipping_counts_all_stages_and_microbatches_add_up(ranks, single, run, tmp_path):
    """With two microbatches a step, of two parts each."""
    expected = single("llama-tiny", **CLIPPED)
    assert (expected - single("llama-tiny")).abs().max() > 1e-3, "nothing was clipped"
    system = {2: "single", 4: "fsdp2"}[ranks]
    losses = run(
        tmp_path, ranks, model="llama-tiny", system=system, pp_degree=2, micro_batch=2,
        pp_schedule="1F1B", **CLIPPED,
    )  # fmt: skip
    assert_near(losses, expected)


@pytest.mark.ranks
def test_checkpoints_go_from_a_pipeline_to_one_device_and_back(single, run, tmp_path):
    expected = single("llama-tiny")
    pipeline = {"pp_degree": 2, "pp_schedule": "ZBVZeroBubble", "pp_microbatches": 4}
    pipeline |= {"pp_split_points": "model.layers.0,model.layers.1,lm_head", "model": "llama-tiny"}
    run(tmp_path / "a", 2, save_at=3, steps=3, **pipeline)
    middle = str(tmp_path / "a" / "checkpoints" / "step-00000003")
    alone = run(tmp_path / "b", 1, model="llama-tiny", resume=middle, save_at=6, steps=6)
    later = str(tmp_path / "b" / "checkpoints" / "step-00000006")
    resumed = run(tmp_path / "c", 2, resume=later, **pipeline)
    assert (len(alone), len(resumed)) == (3, 2)
    assert (torch.cat([alone, resumed]) - expected[3:]).abs().max() <= 1e-5
