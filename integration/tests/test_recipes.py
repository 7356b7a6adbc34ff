"""The recipes of products of parallelism train as one device does, and exchange checkpoints."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from integration.models import model_shape
from integration.train.config import NATIVE_RANDOM, read_toml
from integration.train.validation import validate

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
# torch says so of every mesh without a CUDA device.
QUIET = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete")
STEPS = 20
# Which product continues from which one's checkpoint, and with which other options.
EXCHANGES = {
    "llama-pp2-fsdp2-tp2": ("llama-hsdp2x2-tp2", {}),
    "llama-hsdp2x2-tp2": ("llama-pp2-fsdp2-tp2", {}),
    "llama-fsdp2-cp2-tp2": (
        "llama-pp2-fsdp2-tp2", {"dropout": 0.0, "random": NATIVE_RANDOM, "micro_batch": 2},
    ),
    "mixtral-fsdp4-ep2-tp2": ("mixtral-pp2-fsdp4-ep2", {}),
    "mixtral-pp2-fsdp4-ep2": ("mixtral-fsdp4-ep2-tp2", {}),
    "dit-pp2-fsdp2-tp2": (
        "dit-pp2-fsdp2-tp2",
        {
            "pp_degree": 1, "pp_microbatches": None, "dp_shard": 4, "micro_batch": 1,
            "tp": 1, "sp": False, "ranks": 4,
        },
    ),
}  # fmt: skip


def options_of(name):
    """The options of a recipe as the tests' runs take them: nothing is saved but on request."""
    options = tomllib.loads(RECIPES[name].read_text())
    return options | {"checkpoint_every": 0}


def samples_at_a_time(options):
    """How many samples a stage, or the model, runs at a time on all ranks together."""
    samples = options["micro_batch"] * options.get("dp_replicate", 1) * options.get("dp_shard", 1)
    if options.get("pp_degree", 1) == 1:
        return samples
    return samples // options.get("pp_microbatches", options["micro_batch"])


def alone(options):
    """The run of one device that draws the same numbers."""
    names = ("model", "global_batch", "sequence_length", "dropout", "clip_grad_norm")
    same = {name: options[name] for name in names if name in options}
    return same | {"system": "single", "micro_batch": samples_at_a_time(options)}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_and_explains_each_line(name):
    config = read_toml(RECIPES[name])
    validate(replace(config, steps=STEPS))
    lines = RECIPES[name].read_text().splitlines()
    assert lines[0].startswith("# ")
    assert f"--config integration/recipes/{name}.toml" in "\n".join(lines)
    assert all(line.startswith("#") or "  # " in line for line in lines)


def test_every_recipe_is_exchanged():
    assert EXCHANGES.keys() == RECIPES.keys()


@pytest.mark.slow
@pytest.mark.ranks
@QUIET
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_one_device_does(name, train_runs, tmp_path):
    options = options_of(name)
    ranks = options.pop("ranks")
    (expected,) = train_runs(1, [alone(options)], out=tmp_path / "alone", steps=STEPS)
    (losses,) = train_runs(ranks, [options], out=tmp_path / "product", steps=STEPS)
    tolerance = model_shape(options["model"]).tolerance
    assert losses == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.mark.slow
@pytest.mark.ranks
@QUIET
@pytest.mark.parametrize("name", RECIPES)
def test_another_product_continues_with_the_same_losses(name, train_runs, tmp_path):
    """Weights, optimizer state and random numbers are in the checkpoint of the tenth step."""
    other, changed = EXCHANGES[name]
    options, continued = options_of(name), options_of(other) | changed
    if "cp" in options:
        assert options.get("dropout", 0.0) == continued["dropout"] == 0.0
    assert samples_at_a_time(options) == samples_at_a_time(continued) or "cp" in options
    ranks, others = options.pop("ranks"), continued.pop("ranks")
    (losses,) = train_runs(ranks, [options | {"save_at": 10}], out=tmp_path / "first", steps=STEPS)
    middle = str(tmp_path / "first" / "checkpoints" / "step-00000010")
    continued |= {"resume": middle}
    (rest,) = train_runs(others, [continued], out=tmp_path / "second", steps=STEPS)
    tolerance = model_shape(options["model"]).tolerance
    assert rest == pytest.approx(losses[10:], rel=0, abs=tolerance)
