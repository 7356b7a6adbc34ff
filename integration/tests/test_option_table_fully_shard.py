"""Every option of fully_shard and its methods is in effect beside every other, or refused."""

import re
from pathlib import Path

import pytest

import fsdp
from integration.option_table.__main__ import fully_shard_section
from integration.option_table.fully_shard.apply import build
from integration.option_table.fully_shard.choices import (
    CHOICES,
    completed,
    covering_runs,
    gradients_are_right,
    pairs,
    run_options,
)
from integration.option_table.pairwise import uncovered
from testkit import CommLog, fake_mesh


def _observe(options):
    from integration.option_table.fully_shard.observation import observe

    return observe(options)


@pytest.fixture(scope="module")
def runs(option_runs):
    return option_runs(_observe, run_options, gradients_are_right)


@pytest.mark.slow  # half a minute to validate all pairs, as do the other tests of pairs
def test_every_accepted_pair_fully_shard_section_occurs_in_a_run():
    assert uncovered(pairs(), covering_runs()) == []
    assert {choice for run in covering_runs() for choice in run} == set(CHOICES)


def test_a_choice_alone_is_accepted():
    assert all(completed((choice,)).run for choice in CHOICES)


@pytest.mark.slow
def test_a_refused_pair_has_sent_nothing_and_moved_no_parameter(monkeypatch):
    refused = [pair for pair in pairs() if pair.refusal is not None]
    by_call = [pair for pair in refused if not pair.refusal.startswith(("set_", "fsdp:"))]
    assert len(by_call) > 5
    assert len(refused) > len(by_call)
    parts = []

    def fully_shard(module, **options):
        parts.append((module, dict(module.named_parameters())))
        return sharded(module, **options)

    sharded = fsdp.fully_shard
    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    for pair in refused:
        options = run_options((pair.first, pair.second))
        with fake_mesh((options["ranks"],)):
            with CommLog() as log, pytest.raises(ValueError, match=re.escape(pair.refusal)):
                build(options)
            placed = {"scatter", "broadcast"} if options.get("parameters") == "DTensor" else set()
            assert set(log.counts()) <= placed, pair  # by parallelize_module, before fully_shard
            if pair in by_call:
                module, before = parts[-1]
                now = dict(module.named_parameters())
                assert all(now[name] is param for name, param in before.items()), pair


@pytest.mark.ranks
@pytest.mark.slow  # each option has tests in packages/fsdp
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_fully_shard_section_is_in_effect(choice, runs):
    runs.check_on_two_ranks(choice, [completed((choice,)).run])


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_fully_shard_section_is_in_effect_beside_every_option(choice, runs):
    runs.check(choice, covering_runs())


@pytest.mark.slow
def test_the_pages_section_is_written_from_the_table():
    written = Path(__file__).parents[2] / "docs" / "support" / "options.md"
    assert fully_shard_section() in written.read_text(), "run: python -m integration.option_table"
