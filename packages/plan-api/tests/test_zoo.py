"""What the plans of known models refuse."""

import pytest

from plan_api import zoo


def test_a_sequence_is_cut_along_tp_or_not_at_all(mesh):
    with pytest.raises(ValueError, match="sp=True cuts the sequence along tp, which is None"):
        zoo.llama(mesh, tp=None, dp="dp", sp=True)


def test_axes_that_the_mesh_lacks_are_named(mesh):
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ep'"):
        zoo.llama(mesh, tp="ep")
