"""The optimizers of fsdp train in static mode, and a DiT, as on one device.

`test_policies_of_products.py` has LLaMA and Mixtral with every product in Eager.
"""

import pytest

# 8 bits and an iteration that orthogonalizes amplify rounding, and eigenvectors for eigenvalues of
# zero are determined by it.
TOLERANCES = {"adam8bit": 5e-5, "muon": 5e-5, "soap": 1e-3}
STEPS = 6
PRODUCTS = {
    "FSDP x TP, static": {"dp_shard": 2, "tp": 2, "sp": True, "static": True},
    "PP x TP, static": {"pp_degree": 2, "tp": 2, "static": True},
    "DiT, FSDP x TP": {"dp_shard": 2, "tp": 2, "model": "dit-tiny"},
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Adam8bit. the shards of parameter")
@pytest.mark.parametrize("optimizer", TOLERANCES)
def test_losses_are_those_of_one_device(optimizer, train_runs, tmp_path):
    runs = [
        {"system": "plan", "optimizer": optimizer, "micro_batch": 4} | product
        for product in PRODUCTS.values()
    ]
    kinds = sorted({run.get("model", "llama-tiny") for run in runs})
    alone = [{"model": kind, "optimizer": optimizer, "micro_batch": 8} for kind in kinds]
    found = train_runs(1, alone, out=tmp_path / "alone", steps=STEPS)
    expected = dict(zip(kinds, found, strict=True))
    losses = train_runs(4, runs, out=tmp_path / "products", steps=STEPS)
    for name, run, each in zip(PRODUCTS, runs, losses, strict=True):
        of_one = expected[run.get("model", "llama-tiny")]
        assert each == pytest.approx(of_one, rel=0, abs=TOLERANCES[optimizer]), name
