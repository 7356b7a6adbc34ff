"""The Python examples of the README and of the package's pages run, and so does a plan of them."""

from pathlib import Path

from plan_api import zoo
from testkit import fake_mesh
from testkit.inspection.readme import blocks, examples, page_examples, run_examples

PLANS = (Path(__file__).parents[3] / "docs/packages/plan-api/details.md").read_text()
EXAMPLES = [*examples(__file__), *page_examples(__file__)]


def test_examples_run(tmp_path):
    run_examples(EXAMPLES, tmp_path)


def test_the_plan_of_fsdp_beside_experts_is_valid():
    plans = [code for code in blocks(PLANS, "") if code.startswith("plan =")]
    (lines,) = (code for code in plans if "fully_shard" in code)
    with fake_mesh((2, 2), ("rest", "ep")) as mesh:
        scope = {"zoo": zoo, "mesh": mesh}
        exec(lines, scope)
    assert str(scope["plan"]).count("fully_shard") == 3
