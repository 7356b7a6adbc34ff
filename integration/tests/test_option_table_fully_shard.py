"""Every option of fully_shard and its methods is in effect beside every other, or refused."""

import re
from pathlib import Path

import pytest

import fsdp
from integration.option_table.__main__ import of_fully_shard
from integration.option_table.fully_shard.apply import build
from integration.option_table.fully_shard.choices import (
    CHOICES,
    completed,
    covering_runs,
    gradients_are_right,
    pairs,
    run_options,
)
from testkit import CommLog, fake_mesh, run_ranks


def _observe(options):
    from integration.option_table.fully_shard.observation import observe

    return observe(options)


def _names(run):
    return ", ".join(choice.name for choice in run)


@pytest.fixture(scope="module")
def observed():
    """The observations of all ranks of a run, which is made once; or what it failed with."""
    found = {}

    def observed(run):
        if run not in found:
            options = run_options(run)
            try:
                found[run] = tuple(run_ranks(_observe, options["ranks"], options, timeout=120))
            except Exception as error:
                found[run] = error
        if isinstance(found[run], Exception):
            pytest.fail(f"{_names(run)}: {found[run]}")
        return found[run]

    return observed


def test_every_accepted_pair_of_fully_shard_occurs_in_a_run():
    accepted = {frozenset((p.first, p.second)) for p in pairs() if p.refusal is None}
    covered = {frozenset((a, b)) for run in covering_runs() for a in run for b in run}
    assert not accepted - covered
    assert {choice for run in covering_runs() for choice in run} == set(CHOICES)


def test_a_choice_alone_is_accepted():
    assert all(completed((choice,)).run for choice in CHOICES)


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


def _check(choice, observed, ranks):
    for run in covering_runs():
        if choice in run and run_options(run)["ranks"] == ranks:
            seen, options = observed(run), run_options(run)
            assert choice.proof(seen, options), f"{choice.name} is ignored in {_names(run)}"
            assert gradients_are_right(seen, options), _names(run)


@pytest.mark.ranks
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_of_fully_shard_is_in_effect(choice, observed):
    _check(choice, observed, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_of_fully_shard_is_in_effect_on_four_ranks(choice, observed):
    _check(choice, observed, 4)


def test_the_pages_section_is_written_from_the_table():
    written = Path(__file__).parents[2] / "docs" / "options.md"
    assert of_fully_shard() in written.read_text(), "run: python -m integration.option_table"
