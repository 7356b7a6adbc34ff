"""Every option of Plan and of parallelize is in effect beside every other, or refused."""

import re
from pathlib import Path

import pytest

from integration.option_table.__main__ import plan_section
from integration.option_table.pairwise import uncovered
from integration.option_table.plan.apply import build, mesh_of
from integration.option_table.plan.choices import CHOICES, is_right, run_options, table
from plan_api import uninstall
from testkit import CommLog, fake_mesh

pytestmark = [
    pytest.mark.slow,  # the table applies 700 plans; each option has tests in plan-api
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
    pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one"),
]


def _observe(options):
    from integration.option_table.plan.observation import observe

    return observe(options)


@pytest.fixture(scope="module")
def runs(option_runs):
    return option_runs(_observe, run_options, is_right)


def test_every_accepted_pair_of_a_plan_occurs_in_a_run():
    assert uncovered(table().pairs, table().runs) == []
    assert {choice for run in table().runs for choice in run} == set(CHOICES)


def test_a_choice_alone_is_accepted():
    assert table().refusals == dict.fromkeys(CHOICES)


def test_a_refused_pair_has_sent_nothing_and_moved_no_parameter(monkeypatch):
    from integration.option_table.plan import apply

    refused = [pair for pair in table().pairs if pair.refusal is not None]
    assert len(refused) == 46
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


@pytest.mark.ranks
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_an_option_of_a_plan_is_in_effect_beside_every_option(choice, runs):
    runs.check(choice, table().runs)


def test_the_pages_section_is_written_from_the_table():
    written = Path(__file__).parents[2] / "docs" / "support" / "options.md"
    assert plan_section() in written.read_text(), "run: python -m integration.option_table"
