"""What importing the planner loads: the standard library, and nothing of torch's size."""

from testkit.inspection.imports import PACKAGES, loaded_by

NOT_LOADED = PACKAGES - {"ragged_shard"} | {"torch", "numpy", "rich", "matplotlib"}


def test_importing_and_using_it_loads_no_torch_and_no_numpy():
    use = (
        "from ragged_shard.planner import TensorSpec, plan_layout\n"
        "layout = plan_layout([TensorSpec('a', 60, 7), TensorSpec('b', 9)], 4, order='best')\n"
        "layout.explain(); layout.from_json(layout.to_json()).fingerprint()"
    )
    assert not loaded_by(use) & NOT_LOADED


def test_that_check_notices_numpy():
    assert "numpy" in loaded_by("import ragged_shard.planner, numpy") & NOT_LOADED
