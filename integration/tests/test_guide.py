"""The guide's Python blocks run on ranks as they stand, and train as one device does."""

import inspect
import re
from pathlib import Path

import pytest

from integration.train.config import TrainConfig
from plan_api import Plan, parallelize, zoo
from testkit import run_ranks
from testkit.inspection.readme import blocks

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "tutorials" / "migration.md").read_text()
COMMON, *SECTIONS = re.split(r"^## ", GUIDE, flags=re.MULTILINE)
EXAMPLES = {
    title: blocks(text, "python")
    for title, text in (section.split("\n", 1) for section in SECTIONS)
    if blocks(text, "python")
}
RANKS = {
    "From FSDP2": 2,
    "From TorchTitan": 4,
    "From Megatron-LM": 2,
    "Checkpoints": 2,
    "Optimizers, precision, activation checkpointing, compilation": 2,
}
# One device's losses: of the first three steps, or of the three after them.
EXACT = {
    "From FSDP2": {"before": 0, "after": 0, "planned": 0},
    "From TorchTitan": {"before": 0, "after": 0},
    "From Megatron-LM": {"after": 0},
    "Checkpoints": {"before": 1, "after": 1, "back": 1},
    "Optimizers, precision, activation checkpointing, compilation": {},
}


def _losses(examples, folder):
    """Run blocks as one script on this rank; return the lists of losses that it leaves."""
    import contextlib
    import linecache
    import warnings

    import torch
    from torch.distributed.tensor import DTensor

    from integration.train.session import restore_torch

    restore_torch()  # ranks of the pool have had different tests, and have to be alike
    # The source of functions has to be found, as that of a script's is.
    code = "\n".join(examples)
    name = f"<guide {hash(code)}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    scope = {}
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
        exec(compile(code, name, "exec"), scope)
    return {
        key: [(loss.full_tensor() if isinstance(loss, DTensor) else loss).item() for loss in losses]
        for key, losses in scope.items()
        if isinstance(losses, list) and losses and isinstance(losses[0], torch.Tensor)
    }


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Losses of three steps, and of three more on the same batch."""
    script = """
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first, second = train(model, optimizer), train(model, optimizer)
"""
    examples = [*blocks(COMMON, "python"), script]
    (found,) = run_ranks(_losses, 1, examples, str(tmp_path_factory.mktemp("one")))
    assert found["first"][0] - found["second"][-1] > 0.1, "the comparison is empty"
    return [found["first"], found["second"]]


def test_every_section_with_examples_has_its_ranks():
    assert EXAMPLES.keys() == RANKS.keys() == EXACT.keys()


@pytest.mark.ranks
@pytest.mark.parametrize("title", EXAMPLES)
def test_examples_train_as_one_device(title, one_device, tmp_path):
    examples = [*blocks(COMMON, "python"), *EXAMPLES[title]]
    found = run_ranks(_losses, RANKS[title], examples, str(tmp_path), timeout=240)
    means = {
        name: [sum(step) / len(found) for step in zip(*(r[name] for r in found), strict=True)]
        for name in found[0]
    }
    for name, continues in EXACT[title].items():
        assert means.pop(name) == pytest.approx(one_device[continues], abs=1e-5, rel=0), name
    for losses in means.values():  # bfloat16, clipped, 8-bit moments
        assert losses == pytest.approx(one_device[0], abs=0.05)
        assert losses[0] - losses[-1] > 0.1


def test_options_of_the_trainer_exist():
    (table,) = (text for text in SECTIONS if text.startswith("Options"))
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")][2:]
    fields = TrainConfig.__dataclass_fields__
    named = {
        option[2:].replace("-", "_") for row in rows for option in re.findall(r"--[\w-]+", row[-1])
    }
    assert len(named) > 15
    assert named <= fields.keys()
    words = " ".join(row[-2] for row in rows)
    takers = (zoo.llama, zoo.mixtral, Plan.fully_shard, parallelize)
    taken = {name for taker in takers for name in inspect.signature(taker).parameters}
    assert set(re.findall(r"(\w+)=", words)) <= taken
