"""Every option of Plan and of parallelize is in effect beside every other, or refused."""

import re
from pathlib import Path

import pytest

from integration.option_table.__main__ import of_plan
from integration.option_table.plan.apply import build, mesh_of
from integration.option_table.plan.choices import CHOICES, is_right, run_options, table
from plan_api import uninstall
from testkit import CommLog, fake_mesh, run_ranks

pytestmark = [
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
    pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one"),
]


def _observe(options):
    from integration.option_table.plan.observation import observe

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


def test_every_accepted_pair_of_a_plan_occurs_in_a_run():
    accepted = {frozenset((p.first, p.second)) for p in table().pairs if p.refusal is None}
    covered = {frozenset((a, b)) for run in table().runs for a in run for b in run}
    assert not accepted - covered
    assert {choice for run in table().runs for choice in run} == set(CHOICES)


def test_a_choice_alone_is_accepted():
    assert table().alone == dict.fromkeys(CHOICES)


def test_a_refused_pair_has_sent_nothing_and_moved_no_parameter(monkeypatch):
    from integration.option_table.plan import apply

    refused = [pair for pair in table().pairs if pair.refusal is not None]
    assert len(refused) > 20
    models, make = [], apply.make

    def made(*given):
        models.append(make(*given))
        models.append(dict(models[-1].named_parameters()))
        return models[-2]

    monkeypatch.setattr(apply, "make", made)
    try:
        for pair in refused:
            options = run_options((pair.first, pair.second))
            with fake_mesh((options["ranks"],)):
                with CommLog() as log, pytest.raises(ValueError, match=re.escape(pair.refusal)):
                    build(options, mesh_of(options))
                model, before = models[-2:]
                assert log.counts() == {}, pair
                assert all(before[name] is param for name, param in model.named_parameters()), pair
                assert not model._forward_hooks, pair
                assert not model._forward_pre_hooks, pair
    finally:
        uninstall()


def _check(choice, observed, ranks):
    for run in table().runs:
        if choice in run and run_options(run)["ranks"] == ranks:
            seen, options = observed(run), run_options(run)
            assert choice.proof(seen, options), f"{choice.name} is ignored in {_names(run)}"
            assert is_right(seen, options), _names(run)


@pytest.mark.ranks
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_of_a_plan_is_in_effect(choice, observed):
    _check(choice, observed, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_of_a_plan_is_in_effect_on_four_ranks(choice, observed):
    _check(choice, observed, 4)


def test_the_pages_section_is_written_from_the_table():
    written = Path(__file__).parents[2] / "docs" / "options.md"
    assert of_plan() in written.read_text(), "run: python -m integration.option_table"
