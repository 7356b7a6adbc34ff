"""The picture of placements: its colours are the elements that the ranks hold."""

import pytest

from integration.gallery.pictures.placements import SHAPE, panels, ranks_by_element
from ragged_shard.visualization.ownership import ownership


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel.title)
def test_every_element_has_the_colours_of_the_ranks_that_hold_it(panel):
    expected = ownership(SHAPE, mesh_shape=panel.mesh_shape, placements=panel.placements).ranks
    found = ranks_by_element(panel)
    assert [list(found[index]) for index in range(SHAPE[0] * SHAPE[1])] == (
        expected.flatten(0, 1).tolist()
    )
