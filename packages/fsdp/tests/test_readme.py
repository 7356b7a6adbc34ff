"""The Python examples of the README and of docs/packages/fsdp/details.md run unchanged."""

import pytest

from testkit.inspection.readme import examples, run_example

EXAMPLES = examples(__file__, "docs/packages/fsdp/details.md")


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[-2][:40])
def test_an_example_runs(code, tmp_path):
    run_example(code, tmp_path)
