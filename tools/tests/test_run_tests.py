import os
import sys
from pathlib import Path

import pytest

from tools import run_tests
from tools.workspace import ROOT, projects

PASSES = "def test_one():\n    print('seen')\n\n\ndef test_two():\n    pass\n"
FAILS = "def test_one():\n    assert not 'seen'\n"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Two projects of one test file each: ``good`` passes, ``bad`` fails."""
    for name, text in (("good", PASSES), ("bad", FAILS)):
        folder = tmp_path / name / "tests"
        folder.mkdir(parents=True)
        (folder / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run_tests, "PROJECTS", {name: Path(name) for name in ("good", "bad")})
    return tmp_path


def test_every_project_of_the_workspace_is_there():
    folders = [project.folder for project in projects()] + [ROOT / "tools"]
    assert sorted(ROOT / folder for folder in run_tests.PROJECTS.values()) == sorted(folders)
    assert all((ROOT / folder / "tests").is_dir() for folder in run_tests.PROJECTS.values())


def test_all_projects_run_and_those_that_fail_are_named(workspace, capfd):
    assert run_tests.main(["-p", "no:cacheprovider"]) == 1
    out = capfd.readouterr().out
    assert "2 passed" in out
    assert "assert not 'seen'" in out
    assert out.endswith("failed: bad\n")
    assert {path.name for path in (workspace / "results").iterdir()} == {"good.xml", "bad.xml"}


def test_one_project_runs_on_several_workers_and_arguments_go_to_pytest(workspace, capfd):
    assert run_tests.main(["good", "-k", "two"]) == 0
    out = capfd.readouterr().out
    assert "1 passed" in out
    assert f"{min(len(os.sched_getaffinity(0)) + 1, 4)} workers" in out
    assert [path.name for path in (workspace / "results").iterdir()] == ["good.xml"]


def test_the_results_of_an_earlier_run_are_not_taken_for_this_ones(workspace, monkeypatch):
    stale = workspace / "results" / "good.xml"
    stale.parent.mkdir()
    stale.write_text("stale")
    monkeypatch.setattr(sys, "executable", str(workspace / "bin" / "python"))  # has no pytest
    with pytest.raises(FileNotFoundError):
        run_tests.main(["good"])
    assert not stale.exists()


def test_an_unknown_project_is_refused_before_any_runs(workspace, capfd):
    assert run_tests.main(["good", "bda", "-x"]) == 2
    assert "expected projects of ['good', 'bad'], got ['bda']" in capfd.readouterr().err
    assert not (workspace / "results").exists()


def test_the_slow_tests_run_alone_and_a_project_may_have_none(workspace, capfd):
    slow = "import pytest\n\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n"
    (workspace / "good" / "tests" / "test_slow.py").write_text(slow)
    assert run_tests.main(["-W", "ignore"], slow=True) == 0
    out = capfd.readouterr().out
    assert "1 passed, 2 deselected" in out
    assert out.endswith("passed: good, bad\n")
    assert (workspace / "results" / "slow-good.xml").exists()


@pytest.mark.parametrize(("of_caller", "expected"), [(None, "1"), ("2", "2")])
def test_tests_have_one_thread_unless_the_caller_says_otherwise(
    workspace, monkeypatch, of_caller, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_caller is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", of_caller)
    test = (
        f"import os\n\n\ndef test_it():\n    assert os.environ['OMP_NUM_THREADS'] == '{expected}'\n"
    )
    (workspace / "good" / "tests" / "test_good.py").write_text(test)
    assert run_tests.main(["good", "-n", "0"]) == 0
