"""What the plans of known models refuse."""

import sys

import pytest

from plan_api import zoo

PLANS = ("dit", "gpt2", "llama", "vit")


@pytest.mark.parametrize("name", PLANS)
def test_a_sequence_is_cut_along_tp_or_not_at_all(mesh, name):
    said = rf"zoo\.{name}: sp=True cuts the sequence along tp, which is None"
    with pytest.raises(ValueError, match=said):
        getattr(zoo, name)(mesh, tp=None, dp="dp", sp=True)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_vocabulary_is_cut_along_tp_or_not_at_all(mesh, name):
    said = rf"zoo\.{name}: loss_parallel=True cuts the vocabulary along tp, which is None"
    with pytest.raises(ValueError, match=said):
        getattr(zoo, name)(mesh, tp=None, dp="dp", loss_parallel=True)


@pytest.mark.parametrize("name", PLANS)
def test_axes_that_the_mesh_lacks_are_named(mesh, name):
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ep'"):
        getattr(zoo, name)(mesh, tp="ep")
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ddp'"):
        getattr(zoo, name)(mesh, dp="ddp")


@pytest.mark.parametrize("name", ["dit", "gpt2"])
def test_fused_projections_need_ragged_shard_and_say_so(mesh, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ragged_shard", None)
    with pytest.raises(ImportError, match=rf"zoo\.{name}: .*pip install plan-api\[ragged\]"):
        getattr(zoo, name)(mesh)
    getattr(zoo, name)(mesh, tp=None, dp="dp")
