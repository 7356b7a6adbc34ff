"""Every trainer option that changes execution is in effect beside every other, or refused."""

from pathlib import Path

import pytest

from integration.option_table.__main__ import of_trainer
from integration.option_table.choices import CHOICES
from integration.option_table.covering import covering_runs, pairs, run_options
from testkit import run_ranks

pytestmark = [
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
    # Native FSDP2 says so of a root whose logits tensor parallelism has reshaped.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


def _observe(options):
    import torch.distributed as dist

    from integration.option_table.observation import observe
    from integration.train.config import TrainConfig
    from integration.train.session import restore_torch
    from integration.train.world import World

    restore_torch()  # of another test in the same processes
    return observe(TrainConfig(**options), World(dist.get_rank(), dist.get_world_size()))


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """The observations of all ranks of a run, which is made once; or what it failed with."""
    found = {}

    def observed(run):
        if run not in found:
            options = run_options(run) | {"out": Path(tmp_path_factory.mktemp("run"))}
            try:
                found[run] = tuple(run_ranks(_observe, options["ranks"], options, timeout=120))
            except Exception as error:
                found[run] = error
        return found[run]

    return observed


def _names(choices):
    return " ".join(choice.name for choice in choices)


def test_every_accepted_pair_occurs_in_a_run():
    accepted = {frozenset((p.first, p.second)) for p in pairs() if p.refusal is None}
    covered = {frozenset((a, b)) for run in covering_runs() for a in run for b in run}
    assert not accepted - covered
    assert {choice for run in covering_runs() for choice in run} == set(CHOICES)


def test_a_refusal_names_an_option_of_the_pair():
    for pair in pairs():
        if pair.refusal is not None:
            words = _names((pair.first, pair.second)).split()
            named = {word for word in words if word in pair.refusal} - {"--system", "2", "1"}
            assert named, pair


def _check(choice, observed, ranks):
    """Fails where a run on this many ranks fails, or does not show the choice that it has."""
    for run in covering_runs():
        if choice in run and run_options(run)["ranks"] == ranks:
            seen = observed(run)
            if isinstance(seen, Exception):
                pytest.fail(f"{_names(run)}: {seen}")
            assert choice.proof(seen, run_options(run)), (
                f"{choice.name} is ignored in {_names(run)}"
            )


@pytest.mark.ranks
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_is_in_effect_beside_every_option_it_is_accepted_with(choice, observed):
    _check(choice, observed, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_is_in_effect_in_products_on_four_ranks(choice, observed):
    _check(choice, observed, 4)


@pytest.mark.ranks
def test_initial_weights_are_one_devices_where_the_options_promise_it(observed):
    weights = {}
    for run in covering_runs():
        options = run_options(run)
        promised = options.get("init") != "sharded" or options["system"] == "plan"
        if promised and options["ranks"] == 2:
            seen = observed(run)
            if not isinstance(seen, Exception) and seen[0].weights is not None:
                weights.setdefault(options["model"], set()).add(seen[0].weights)
    assert {model: len(found) for model, found in weights.items()} == dict.fromkeys(weights, 1)
    assert len(weights) > 1


def test_the_pages_section_is_written_from_the_table():
    written = Path(__file__).parents[2] / "docs" / "options.md"
    assert written.read_text().startswith(of_trainer()), "run: python -m integration.option_table"
