import pytest

from tools import check_language
from tools.workspace import ROOT

FUSED_COMM = "packages/fused-comm/src/fused_comm/"


@pytest.fixture
def printed(workspace, capsys, monkeypatch):
    """A function that writes a file and returns what is refused of the workspace."""

    def check(name: str, text: str) -> str:
        (workspace / name).write_text(text)
        status = check_language.main(workspace)
        out: str = capsys.readouterr().out
        assert status == (1 if out else 0)
        return out

    return check


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("adopt.py", "", "adopt.py:1: the name adopt; write reset_sharded_param or swap\n"),
        ("given.py", "", "given.py:1: the module given; write arguments\n"),
        ("a.py", "class Keeper: ...\n", "a.py:1: the name Keeper; write cache\n"),
        ("a.py", "\ndef roll_call(): ...\n", "a.py:2: the name roll_call; write liveness_check\n"),
        ("a.py", "def f(twin): ...\n", "a.py:1: the name twin; write shadow_model\n"),
        ("a.py", "x = 1\nx.stock = 2\n", "a.py:2: the name stock; write native\n"),
        ("a.cpp", "int a;\nint last_words;\n", "a.cpp:2: the name last_words; write resolved_"),
        ("a.py", "# validated,\n# held against it\n", "a.py:2: 'held against'; write validated"),
        ("a.py", 'f"{1} of ours"\n', "a.py:1: 'ours'; write this package, torch, native\n"),
        ("a.py", '"""A\n\nThe stock one."""\n', "a.py:3: 'stock'; write native or torch's\n"),
        ("a.h", "int a;  // it lies in memory\n", "a.h:1: 'lies in'; write is placed, is\n"),
        ("a.md", "```\nstock\n```\nIt wants a mesh\n", "a.md:4: 'wants'; write expected, takes\n"),
    ],
)
def test_a_name_or_phrase_is_refused_with_what_to_write(printed, name, text, expected):
    assert printed(f"{FUSED_COMM}{name}", text).startswith(f"{FUSED_COMM}{expected}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "import stock\nstock.held()\n"),  # defined elsewhere
        ("a.py", "keeps = standing = line = 1\n"),
        ("a.md", "`stock` is code\n"),
        ("a.txt", "stock\n"),
    ],
)
def test_other_words_pass(printed, name, text):
    assert printed(f"{FUSED_COMM}{name}", text) == ""


def test_what_is_allowed_passes(printed, monkeypatch):
    where = f"{FUSED_COMM}a.py"
    assert printed(where, "stock = 1  # ours\n").count("\n") == 2
    allowed = {(where, "stock"): "a test", (where, r"\b(ours|theirs)\b"): "a test"}
    monkeypatch.setattr(check_language, "ALLOWED", allowed)
    assert printed(where, "stock = 1  # ours\n") == ""


def test_results_of_runs_are_not_checked(printed, workspace):
    (workspace / "integration-results").mkdir()
    assert printed("integration-results/report.md", "stock\n") == ""
    assert printed("README.md", "stock\n") == "README.md:1: 'stock'; write native or torch's\n"


def test_what_is_allowed_is_there(monkeypatch):
    allowed, checked = check_language.ALLOWED, set(check_language.files(ROOT))
    for one in allowed:
        others = {other: why for other, why in allowed.items() if other != one}
        monkeypatch.setattr(check_language, "ALLOWED", others)
        path = ROOT / one[0]
        assert path in checked
        assert list(check_language.check(path, ROOT)), f"{one} need not be allowed any more"
