"""Products of three kinds of parallelism on 2 x 2 x 2 ranks train as one device does."""

import pytest

pytestmark = [
    pytest.mark.slow,
    # torch says so of every mesh without a CUDA device.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
]

STEPS = 10
BATCH = {"global_batch": 8, "micro_batch": 2}
# The model, the degrees, and how far a loss may be from that of one device; Mixtral's routing can
# amplify rounding.
PRODUCTS = {
    "HSDP x TP + SP": (
        "llama-tiny", {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "sp": True}, 1e-5,
    ),
    "DP x CP x TP": (
        "llama-tiny", {"dp_replicate": 2, "cp": 2, "tp": 2, "sp": True}, 1e-5,
    ),
    "FSDP x EP x TP": (
        "mixtral-tiny", {"dp_shard": 4, "ep": 2, "tp": 2}, 6e-5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS)
def test_losses_on_eight_ranks_are_those_of_one_device(product, train_runs, tmp_path):
    model, degrees, tolerance = PRODUCTS[product]
    common = {"model": model, **BATCH}
    (alone,) = train_runs(1, [common | {"system": "single"}], out=tmp_path / "1", steps=STEPS)
    planned = common | {"system": "plan", **degrees}
    (losses,) = train_runs(8, [planned], out=tmp_path / "8", steps=STEPS)
    assert losses == pytest.approx(alone, rel=0, abs=tolerance)
