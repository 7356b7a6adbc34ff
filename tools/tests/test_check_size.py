import pytest

from tools import check_size
from tools.workspace import ROOT

TESTKIT = "testkit/src/testkit"


def function(lines: int, docstring: str = "") -> str:
    return f"def long():{docstring}\n" + "    x = 1\n" * (lines - 1)


@pytest.fixture
def printed(workspace, capsys):
    """A function that writes a file and returns what is too large in the workspace."""

    def check(name: str, text: str) -> str:
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        status = check_size.main(workspace)
        out: str = capsys.readouterr().out
        assert status == (1 if out else 0)
        return out

    return check


@pytest.mark.parametrize("name", ["a.py", "a.cpp", "a.h", "a.cu"])
def test_a_file_of_701_lines_is_named_with_its_remedy(printed, name):
    assert printed(f"{TESTKIT}/{name}", "x = 1\n" * 701) == (
        f"{TESTKIT}/{name}:701: the file has 701 lines, and 700 are the most; "
        "split it into modules with one concept each\n"
    )


def test_a_function_of_61_lines_is_named_with_its_remedy(printed):
    assert printed(f"{TESTKIT}/a.py", "\n" + function(61)) == (
        f"{TESTKIT}/a.py:2: long has 61 lines besides its docstring, and 60 are the most; "
        "make functions of its steps\n"
    )


def test_a_folder_of_17_entries_is_named_with_its_remedy(printed, workspace):
    folder = "packages/fsdp/src/fsdp/optim"
    for number in range(15):
        assert printed(f"{folder}/a{number}.py", "") == ""
    assert printed(f"{folder}/sub/a.py", "") == ""
    (workspace / folder / "__pycache__").mkdir()
    assert printed(f"{folder}/b.txt", "") == ""
    assert printed(f"{folder}/b.py", "") == (
        f"{folder}: the folder has 17 entries, and 16 are the most; "
        "group what belongs together, or merge it\n"
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param(f"{TESTKIT}/a.py", "x = 1\n" * 700, id="700 lines"),
        pytest.param("testkit/data.txt", "x = 1\n" * 701, id="a text file"),
        pytest.param("packages/fsdp/build/generated.cpp", "x;\n" * 701, id="a build folder"),
        pytest.param(f"{TESTKIT}/a.py", function(60), id="60 lines"),
        pytest.param(f"{TESTKIT}/a.py", function(60, '\n    """A\n\n    B."""'), id="docstring"),
    ],
)
def test_what_is_not_too_large_passes(printed, path, text):
    assert printed(path, text) == ""


def test_what_is_allowed_passes(printed, monkeypatch):
    monkeypatch.setitem(check_size.ALLOWED, f"{TESTKIT}/a.py:long", "a test")
    assert printed(f"{TESTKIT}/a.py", function(61)) == ""


def test_what_is_allowed_is_too_large(monkeypatch):
    allowed = set(check_size.ALLOWED)
    monkeypatch.setattr(check_size, "ALLOWED", {})
    for one in allowed:
        where, _, name = one.partition(":")
        path = ROOT / where
        check = check_size.check_folder if path.is_dir() else check_size.check_file
        assert any(name in line for line in check(path, where)), f"{one} need not be allowed"
