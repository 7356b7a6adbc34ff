"""The Python examples of the README and of the package's pages run unchanged."""

from testkit.inspection.readme import examples, page_examples, run_examples

EXAMPLES = [*examples(__file__), *page_examples(__file__)]


def test_examples_run(tmp_path):
    run_examples(EXAMPLES, tmp_path, ["fsdp", "fsdp.optim", "fsdp.simulate"])
