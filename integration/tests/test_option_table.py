"""Every trainer option that changes execution is in effect beside every other, or refused."""

import json
from pathlib import Path

import pytest

from integration.option_table.__main__ import main, trainer_section
from integration.option_table.pairwise import proving_runs, rank_choice, uncovered
from integration.option_table.trainer.choices import CHOICES, covering_runs, pairs, run_options
from testkit import run_ranks

pytestmark = [
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
    # Native FSDP2 says so of a root whose logits tensor parallelism has reshaped.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # So does --precision on CPUs, of recipes and dtypes that run in plain torch there.
    pytest.mark.filterwarnings("ignore:torch has no kernel for"),
    # So does Adam8bit of experts that tensor parallelism shards into parts of blocks.
    pytest.mark.filterwarnings("ignore:Adam8bit. the shards of parameter"),
    # torch.compile makes an instance of each autograd function that it traces.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]


def _observe(options):
    import torch.distributed as dist

    from integration.option_table.trainer.observation import observe
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.session import restore_torch

    restore_torch()  # of another test in the same processes
    return observe(TrainConfig(**options), World(dist.get_rank(), dist.get_world_size()))


@pytest.fixture(scope="module")
def runs(option_runs, tmp_path_factory):
    def options_of(run):
        folder = tmp_path_factory.getbasetemp() / f"run{covering_runs().index(run)}"
        return run_options(run) | {"out": folder}

    return option_runs(_observe, options_of)


def fast_runs():
    """Runs that the fast tier may choose from: of these packages, and pipelines uncompiled.

    Those in bf16 are left out, in which test_precision trains.
    """
    options = {run: run_options(run) for run in covering_runs()}
    return [
        run
        for run, one in options.items()
        if one.get("dtype") != "bf16"
        and (
            one["system"] in ("fsdp", "plan")
            or (one["system"], "compile" in one) == ("single", False)
        )
    ]


def test_every_accepted_pair_occurs_in_a_run():
    assert uncovered(pairs(), covering_runs()) == []
    assert {choice for run in covering_runs() for choice in run} == set(CHOICES)


def test_a_few_runs_have_every_option_of_all():
    a, b, c, d = CHOICES[:4]
    assert proving_runs([(a, b), (b,), (b, c), (a, c, d), (d,)]) == ((a, c, d), (b,))
    assert proving_runs([]) == ()


def test_a_refusal_names_an_option_of_the_pair():
    for pair in pairs():
        if pair.refusal is not None:
            words = f"{pair.first.name} {pair.second.name}".split()
            named = {word for word in words if word in pair.refusal} - {"--system", "2", "1"}
            assert named, pair


@pytest.mark.slow  # the sections that it writes have tests of their own
def test_the_command_writes_the_page_and_counts_its_options(tmp_path, capsys):
    written, page = tmp_path / "options.md", Path(__file__).parents[2] / "docs/support/options.md"
    assert main([str(written), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["page"] == str(written)
    assert found["options"]["the trainer"] == len(CHOICES)
    assert printed.err.splitlines()[0] == "1/3: the trainer"
    assert written.read_text() == page.read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_is_in_effect(choice, runs):
    runs.check_on_two_ranks(choice, fast_runs())


@pytest.mark.ranks
def test_options_of_dispatched_tokens_are_in_effect_on_two_ranks(tmp_path):
    """Runs of the table have them on four ranks."""
    names = "--ep 2 --ep-chunks 2", "keep-dispatch"
    run = tuple(one for one in CHOICES if one.name.endswith(names))
    options = run_options(run)
    seen = tuple(run_ranks(_observe, 2, options | {"out": tmp_path}, timeout=120))
    assert [choice.proof(seen, options) for choice in run] == [True, True]
    changed = options | {"ep_chunks": 1}
    assert [choice.proof(seen, changed) for choice in run] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_is_in_effect_beside_every_option_it_is_accepted_with(choice, runs):
    runs.check(choice, covering_runs())


@pytest.mark.ranks
def test_initial_weights_are_one_devices_where_the_options_promise_it(runs):
    weights = {}
    for run in proving_runs(runs.on(2, fast_runs())):
        options = run_options(run)
        if options.get("init") != "sharded" or options["system"] == "plan":
            seen = runs.observed(run)
            if seen[0].weights is not None:
                kind = options["model"], options.get("tokenizer")  # of which sizes follow
                weights.setdefault(kind, []).append(seen[0].weights)
    assert {kind: len(set(found)) for kind, found in weights.items()} == dict.fromkeys(weights, 1)
    assert max(map(len, weights.values())) > 1, "nothing is compared"


def test_the_pages_section_is_written_from_the_table():
    written = Path(__file__).parents[2] / "docs" / "support" / "options.md"
    assert written.read_text().startswith(trainer_section()), (
        "run: python -m integration.option_table"
    )


def test_every_rank_has_to_prove_a_rank_choice():
    choice = rank_choice("name", "evidence", lambda seen, options: seen == options["n"], n=1)
    assert choice.options == {"n": 1}
    assert choice.proof((1, 1), choice.options)
    assert not choice.proof((1, 2), choice.options)
