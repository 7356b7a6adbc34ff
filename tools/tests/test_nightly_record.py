"""tools.nightly_record: JUnit files become docs/support/nightly.json and nightly.md."""

import pytest

from tools.nightly_record import PAGES, main, page, read, read_reports

CASES = {
    "passed": '<testcase classname="a.test_x" time="1.5"/>',
    "also": '<testcase classname="a.test_x" time="2.5"/>',
    "skipped": '<testcase classname="a.test_y" time="0"><skipped/></testcase>',
    "failed": '<testcase classname="a.test_y" time="3"><failure/></testcase>',
    "error": '<testcase classname="a.test_y" time="0"><error/></testcase>',
}


@pytest.fixture
def report(tmp_path):
    def make(*names, file="slow-a.xml"):
        path = tmp_path / file
        cases = "".join(CASES[name] for name in names)
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return path

    return make


def test_the_record_has_a_row_per_file_and_what_it_ran_on(report, tmp_path):
    assert main([report("passed", "also", "skipped")], pages=tmp_path) == 0
    text = (tmp_path / "nightly.md").read_text()
    assert "| `a.test_x` | 2 passed, 0 failed, 0 skipped | 4 s |" in text
    assert "| `a.test_y` | 0 passed, 0 failed, 1 skipped | 0 s |" in text
    assert ": 2 passed, 0 failed, 1 skipped." in text
    assert "torch 2." in text


def test_the_reports_of_projects_are_one_record(report, tmp_path):
    reports = [report("passed"), report("failed", file="slow-b.xml")]
    assert main(reports, pages=tmp_path) == 1
    slow = read(tmp_path / "nightly.json").slow
    assert {name: list(of_one) for name, of_one in slow.items()} == {
        "a": ["a.test_x"],
        "b": ["a.test_y"],
    }


def test_a_project_that_did_not_run_keeps_its_results_and_their_commit(
    report, tmp_path, monkeypatch
):
    for commit, names, file in (("1a", ("also", "failed"), "slow-a.xml"), ("2b", (), "slow-b.xml")):
        monkeypatch.setattr("tools.nightly_record.commit_of_tree", lambda _, commit=commit: commit)
        main([report("passed", *names, file=file)], pages=tmp_path)
    of_a, of_b = read(tmp_path / "nightly.json").slow.values()
    assert [of_a["a.test_x"].commit, of_b["a.test_x"].commit] == ["1a", "2b"]
    monkeypatch.setattr("tools.nightly_record.commit_of_tree", lambda _: "3c")
    main([report("passed")], pages=tmp_path)
    of_a, of_b = read(tmp_path / "nightly.json").slow.values()
    assert {name: one.commit for name, one in of_a.items()} == {"a.test_x": "3c"}
    assert of_b["a.test_x"].commit == "2b"
    text = (tmp_path / "nightly.md").read_text()
    assert text.index("at 2b") < text.index("| `a.test_x`") < text.index("at 3c")


def test_a_run_of_some_modules_replaces_theirs_only(report, tmp_path, monkeypatch):
    for commit, names in (("1a", ("passed", "failed")), ("2b", ("skipped",))):
        monkeypatch.setattr("tools.nightly_record.commit_of_tree", lambda _, commit=commit: commit)
        main([report(*names)], pages=tmp_path, of_modules=True)
    modules = read(tmp_path / "nightly.json").slow["a"]
    found = {name: (one.commit, one.counts.failed) for name, one in modules.items()}
    assert found == {"a.test_x": ("1a", 0), "a.test_y": ("2b", 0)}


def test_packages_with_another_torch_have_a_row_and_a_column_each(report, tmp_path, monkeypatch):
    for torch, package in (("2.11.0+cpu", "dbuffer"), ("2.15.1", "fsdp"), ("2.15.1", "dbuffer")):
        monkeypatch.setattr("tools.nightly_record.version", lambda _, torch=torch: torch)
        main([report("passed", "also")], package, pages=tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "nightly.md").read_text().splitlines()]
    heading, dbuffer, fsdp = (row for row in rows if len(row) == 3)
    assert heading == ["| package", "torch 2.11", "torch 2.15 |"]
    assert dbuffer[1].startswith("2 passed, 0 failed, 0 skipped (")
    assert dbuffer[2].startswith("2 passed")
    assert fsdp[1] == "not run"


def test_a_later_run_replaces_its_own_results_only(report, tmp_path):
    main([report("failed")], "fsdp", pages=tmp_path)
    main([report("skipped")], pages=tmp_path)
    main([report("passed")], pages=tmp_path)
    record = read(tmp_path / "nightly.json")
    assert record.slow["a"].keys() == {"a.test_x"}
    [[result]] = [list(of_one.values()) for of_one in record.others.values()]
    assert result.counts.failed == 1
    assert (tmp_path / "nightly.md").read_text() == page(record)


@pytest.mark.parametrize("package", [None, "fsdp"])
@pytest.mark.parametrize("names", [("passed", "failed"), ("passed", "error"), ("skipped",), ()])
def test_a_failure_or_no_test_at_all_is_one_and_is_recorded(names, package, report, tmp_path):
    assert main([report(*names)], package, pages=tmp_path) == 1
    assert (tmp_path / "nightly.md").exists()


def test_an_error_counts_as_a_failure(report):
    assert read_reports([report("error")])["a.test_y"].counts.failed == 1


def test_the_page_is_made_from_the_record():
    assert (PAGES / "nightly.md").read_text() == page(read(PAGES / "nightly.json"))
