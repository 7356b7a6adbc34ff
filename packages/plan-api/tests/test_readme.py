"""The Python examples of the README and of the package's pages run, and so does a plan of them."""

from pathlib import Path

import pytest

from plan_api import zoo
from testkit import fake_mesh
from testkit.inspection.readme import blocks, examples, page_examples, run_example

PLANS = (Path(__file__).parents[3] / "docs/packages/plan-api/details.md").read_text()
EXAMPLES = [*examples(__file__), *page_examples(__file__)]


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0][:40])
def test_an_example_runs(code, tmp_path):
    run_example(code, tmp_path)


def test_the_plan_of_fsdp_beside_experts_is_valid():
    (lines,) = (code for code in blocks(PLANS, "") if code.startswith("plan ="))
    with fake_mesh((2, 2), ("rest", "ep")) as mesh:
        scope = {"zoo": zoo, "mesh": mesh}
        exec(lines, scope)
    assert str(scope["plan"]).count("fully_shard") == 3
