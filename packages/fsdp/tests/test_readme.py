"""The README's Python examples run unchanged."""

import pytest

from testkit.inspection.readme import examples, run_example


@pytest.mark.parametrize("code", examples(__file__), ids=lambda code: code.splitlines()[0][:40])
def test_an_example_runs(code, tmp_path):
    run_example(code, tmp_path)
