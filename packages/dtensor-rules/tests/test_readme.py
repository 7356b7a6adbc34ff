"""The Python examples of the README and of the package's pages run unchanged."""

from testkit.inspection.readme import examples, page_examples, run_examples

COMPILED = "shard_rules"  # the rule in C++, which test_compiled.py compiles
EXAMPLES = [*examples(__file__), *page_examples(__file__)]
PYTHON = [code for code in EXAMPLES if COMPILED not in code]


def test_one_example_is_of_the_compiled_rule():
    assert len(EXAMPLES) == len(PYTHON) + 1


def test_examples_run(tmp_path):
    run_examples(PYTHON, tmp_path)
