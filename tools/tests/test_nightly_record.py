"""tools.nightly_record: a JUnit file becomes docs/nightly.md."""

import pytest

from tools.nightly_record import main, read

CASES = {
    "passed": '<testcase classname="a.test_x" time="1.5"/>',
    "also": '<testcase classname="a.test_x" time="2.5"/>',
    "skipped": '<testcase classname="a.test_y" time="0"><skipped/></testcase>',
    "failed": '<testcase classname="a.test_y" time="3"><failure/></testcase>',
    "error": '<testcase classname="a.test_y" time="0"><error/></testcase>',
}


@pytest.fixture
def report(tmp_path):
    def make(*names):
        path = tmp_path / "nightly.xml"
        cases = "".join(CASES[name] for name in names)
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return path

    return make


def test_the_record_has_a_row_per_file_and_what_it_ran_on(report, tmp_path):
    record = tmp_path / "nightly.md"
    assert main(report("passed", "also", "skipped"), record) == 0
    text = record.read_text()
    assert "| `a.test_x` | 2 passed, 0 failed, 0 skipped | 4 s |" in text
    assert "| `a.test_y` | 0 passed, 0 failed, 1 skipped | 0 s |" in text
    assert ": 2 passed, 0 failed, 1 skipped." in text
    assert "torch 2." in text


@pytest.mark.parametrize("names", [("passed", "failed"), ("passed", "error"), ("skipped",), ()])
def test_a_failure_or_no_test_at_all_is_one_and_is_recorded(names, report, tmp_path):
    record = tmp_path / "nightly.md"
    assert main(report(*names), record) == 1
    assert record.exists()


def test_an_error_counts_as_a_failure(report):
    assert read(report("error"))["a.test_y"].counts.failed == 1
