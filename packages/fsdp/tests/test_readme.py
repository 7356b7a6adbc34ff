"""The Python examples of the README and of the package's pages run unchanged."""

import pytest

from testkit.inspection.readme import examples, page_examples, run_examples


def test_examples_of_the_readme_run(tmp_path):
    run_examples(examples(__file__), tmp_path)


@pytest.mark.slow
def test_examples_of_the_pages_run(tmp_path):
    run_examples(page_examples(__file__), tmp_path)
