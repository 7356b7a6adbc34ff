"""The README's Python examples run as they stand; that of a rule in C++ is in test_compiled.py."""

import pytest

from testkit.inspection.readme import examples, run_example

COMPILED = "cut_rules"
EXAMPLES = [code for code in examples(__file__) if COMPILED not in code]


def test_one_example_is_of_the_compiled_rule():
    assert len(examples(__file__)) == len(EXAMPLES) + 1


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0][:40])
def test_an_example_runs(code, tmp_path):
    run_example(code, tmp_path)
