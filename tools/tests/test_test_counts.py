import pytest

from tools import test_counts


def write_report(folder, name: str, **counts: int) -> None:
    attributes = " ".join(f'{key}="{value}"' for key, value in counts.items())
    (folder / f"{name}.xml").write_text(f"<testsuites><testsuite {attributes}/></testsuites>")


def test_it_adds_the_projects_up_and_ends_on_the_plain_line(tmp_path, capsys):
    write_report(tmp_path, "one", tests=5, failures=0, errors=0, skipped=2)
    write_report(tmp_path, "two", tests=1, failures=0, errors=0, skipped=0)
    assert test_counts.main(["one", "two"], tmp_path) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["one", "3", "passed,", "0", "failed,", "2", "skipped"]
    assert last == "4 passed, 0 failed, 2 skipped"


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(None, id="no report"),
        pytest.param({"tests": 0}, id="no test collected"),
        pytest.param({"tests": 2, "skipped": 2}, id="every test skipped"),
        pytest.param({"tests": 2, "failures": 1}, id="a failure"),
        pytest.param({"tests": 2, "errors": 1}, id="an error"),
    ],
)
def test_it_fails_with(tmp_path, counts):
    write_report(tmp_path, "good", tests=1)
    if counts is not None:
        write_report(tmp_path, "bad", **counts)
    assert test_counts.main(["good", "bad"], tmp_path) == 1
