"""The Python examples of the README and of the package's pages run unchanged."""

import pytest

from testkit.inspection.readme import examples, page_examples, run_example

COMPILED = "shard_rules"  # the rule in C++, which test_compiled.py compiles
EXAMPLES = [*examples(__file__), *page_examples(__file__)]
PYTHON = [code for code in EXAMPLES if COMPILED not in code]


def test_one_example_is_of_the_compiled_rule():
    assert len(EXAMPLES) == len(PYTHON) + 1


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.splitlines()[0][:40])
def test_an_example_runs(code, tmp_path):
    run_example(code, tmp_path)
