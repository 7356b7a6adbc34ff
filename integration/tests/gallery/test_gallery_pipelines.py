"""The picture of pipelines: the idle shares that its titles state are those of the formulas."""

import pytest

from integration.gallery.pictures.pipelines import MICROBATCHES, NAMES, RANKS, timelines
from integration.pipeline.bubble import expected_bubble
from integration.pipeline.schedules import SCHEDULES


def test_bubbles_are_those_of_the_papers():
    found = timelines()
    for name in NAMES[:-1]:
        per_rank = SCHEDULES[name].stages_per_rank or 2
        expected = expected_bubble(name, RANKS, MICROBATCHES, per_rank)
        assert found[name].bubble == pytest.approx(expected)


def test_every_stage_of_zero_bubble_v_works_without_a_pause():
    spans = timelines()["ZBVZeroBubble"].spans
    for rank in range(RANKS):
        own = [span for span in spans if span.rank == rank]
        duration = max(span.end for span in own) - min(span.start for span in own)
        assert duration == pytest.approx(sum(span.action.seconds for span in own))
