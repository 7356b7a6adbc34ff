"""The Python examples of the README and of the package's pages run unchanged."""

import pytest

from testkit.inspection.readme import examples, page_examples, run_example

EXAMPLES = [*examples(__file__), *page_examples(__file__)]


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[-2][:40])
def test_an_example_runs(code, tmp_path):
    run_example(code, tmp_path)
