"""The table of options of other frameworks names arguments and options that exist here."""

import inspect
import re
from pathlib import Path

from integration.train.config import TrainConfig
from plan_api import Plan, parallelize, zoo

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "options-of-others.md"


def test_options_of_the_trainer_exist():
    lines = PAGE.read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")][2:]
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
