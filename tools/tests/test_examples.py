"""The packages' example pages run where no other package of the workspace can be imported.

Each script compares itself with one device or with torch alone, and fails where they differ.
"""

import os
import subprocess
import sys

import pytest

from testkit.inspection.imports import PACKAGES
from tools.examples import Example, examples, run, without
from tools.workspace import ROOT, needed, normalised, packages

BY_NAME = {project.name: project for project in packages()}
SHOWN = [
    pytest.param(name, example, id=f"{name}-{number}")
    for name in BY_NAME
    for number, example in enumerate(examples(name), 1)
]
# Besides the workspace's other packages: what a page says that it does without.
ALSO_WITHOUT = {"ragged-shard": {"torch"}}


def hidden(name):
    """Modules that an example of a package must not need."""
    brought = {BY_NAME[each].source.name for each in needed(name, BY_NAME)}
    return PACKAGES - brought | ALSO_WITHOUT.get(name, set())


# `nox -s wheels` runs them in environments that have nothing else.
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "example"), SHOWN)
def test_an_example_runs_alone(name, example, tmp_path):
    for folder in ("site", "run"):
        (tmp_path / folder).mkdir()
    run(example, tmp_path / "run", env=without(hidden(name), tmp_path / "site"))


@pytest.mark.parametrize(("name", "example"), SHOWN)
def test_an_example_asks_for_its_package_and_for_none_of_ours_beside(name, example):
    asked = [normalised(requirement) for requirement in example.dependencies]
    assert asked[0] == name
    assert not BY_NAME.keys() & set(asked[1:])
    assert "assert" in example.code


@pytest.mark.parametrize("name", BY_NAME)
def test_the_page_is_linked(name):
    assert f"(docs/packages/{name}/example.md)" in (ROOT / "README.md").read_text()
    assert (
        f"(../../docs/packages/{name}/example.md)"
        in (ROOT / "packages" / name / "README.md").read_text()
    )


def test_what_is_hidden_cannot_be_imported_and_the_rest_can(tmp_path):
    found = (
        "import importlib.metadata, importlib.util, json\n"
        "assert importlib.util.find_spec('fused_comm') is None\n"
        "assert importlib.metadata.version('pytest')\n"
        "import ragged_shard.planner\n"
        "try:\n    import fused_comm.ddp\n"
        "except ModuleNotFoundError:\n    print('hidden')"
    )
    command = [sys.executable, "-c", found]
    env = without({"fused_comm"}, tmp_path)
    seen = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (seen.returncode, seen.stdout) == (0, "hidden\n"), seen.stderr


def test_hiding_keeps_the_path_that_was_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/there")
    assert without({"a"}, tmp_path)["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/there"
    monkeypatch.delenv("PYTHONPATH")
    assert without({"a"}, tmp_path)["PYTHONPATH"] == str(tmp_path)


def test_an_example_that_fails_is_an_error(tmp_path):
    failing = Example(tmp_path, "raise SystemExit(3)", ("python", "example.py"))
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        run(failing, tmp_path, env=dict(os.environ))


def test_an_example_ends_behind_its_last_line_before_python_finalizes(tmp_path):
    code = "import atexit, os\natexit.register(os._exit, 3)\nprint('the last line')\n"
    run(Example(tmp_path, code, ("python", "example.py")), tmp_path, env=dict(os.environ))


SCRIPT = "```python\n# /// script\n# dependencies = ['a', 'b>=1']\n# ///\nassert 1\n```\n"
COMMAND = "```sh\npython example.py\n```\n"


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "docs" / "packages" / "a" / "example.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


def test_scripts_and_commands_go_in_pairs(page):
    other = SCRIPT.replace("assert 1", "assert 2")
    ranks = "```sh\ntorchrun --nproc-per-node 2 example.py\n```\n"
    first, second = examples("a", page(f"# a\n\n{SCRIPT}{COMMAND}## b\n\n{other}{ranks}"))
    assert first.dependencies == ["a", "b>=1"]
    assert first.command == ("python", "example.py")
    assert "assert 2" in second.code
    assert second.command == ("torchrun", "--nproc-per-node", "2", "example.py")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nothing", "0 blocks of Python and 0 of commands"),
        (SCRIPT, "1 blocks of Python and 0 of commands"),
        (SCRIPT + "```sh\nbash example.py\n```\n", "expected python or torchrun of example.py"),
        (SCRIPT + "```sh\npython other.py\n```\n", "expected python or torchrun of example.py"),
    ],
)
def test_a_page_that_cannot_be_run_is_an_error(page, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        examples("a", page(text))


def test_a_script_that_does_not_say_what_it_needs_is_an_error(page):
    (example,) = examples("a", page(f"# a\n```python\nassert 1\n```\n{COMMAND}"))
    with pytest.raises(ValueError, match="without `# /// script`"):
        _ = example.dependencies
