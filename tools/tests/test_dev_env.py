"""Which installation a change leads to; pip and venv are stood in for by a list of calls."""

import subprocess

import pytest

from tools import dev_env
from tools import workspace as tools_workspace


class Calls(list):
    """What was installed: pip's arguments but for the flags that are always there."""

    def install(self, env, *what):
        self.append([str(part).rpartition("/")[2] for part in what])

    def run(self, *command):
        self.append([str(command[-2])])  # `python -m venv --clear DIR`
        command[-1].mkdir(parents=True)


@pytest.fixture
def calls(workspace, monkeypatch):
    recorded = Calls()
    (workspace / "constraints.txt").write_text("torch==2.13.0\n")
    groups = '[dependency-groups]\nbuild = ["cmake"]\ndev = ["pytest"]\n'
    (workspace / "pyproject.toml").write_text(groups)
    monkeypatch.setattr(dev_env, "ROOT", workspace)
    monkeypatch.setattr(dev_env, "projects", lambda: tools_workspace.projects(workspace))
    monkeypatch.setattr(dev_env, "install", recorded.install)
    monkeypatch.setattr(dev_env, "run", recorded.run)
    monkeypatch.setattr(dev_env, "packages", lambda: tools_workspace.packages(workspace))
    monkeypatch.setattr(
        dev_env, "unchanged_wheel", lambda project, python: f"{python}/{project.name}.whl"
    )
    monkeypatch.setattr(dev_env, "compile_all", lambda env: None)
    dev_env.synchronise(workspace / "env")
    assert recorded.pop(0) == ["--clear"]
    assert recorded.pop(0) == ["--no-compile", "cmake"]
    assert recorded.pop(0) == ["--no-compile", "pytest"]
    first = recorded.pop(0)
    assert first[:2] == ["--no-compile", "dbuffer.whl"]
    assert first[-2:] == ["testkit", "integration"]  # which are not published
    return recorded


def test_nothing_changed_nothing_installed(workspace, calls):
    assert dev_env.synchronise(workspace / "env") == []
    assert calls == []


def test_a_changed_source_reinstalls_its_package_alone(workspace, calls):
    (workspace / "packages/fsdp/src/fsdp/api.py").write_text("x = 1\n")
    assert dev_env.synchronise(workspace / "env") == ["fsdp"]
    assert calls == [["--no-deps", "fsdp"]]


@pytest.mark.parametrize("path", ["constraints.txt", "packages/fsdp/pyproject.toml"])
def test_changed_pins_or_metadata_install_everything_with_dependencies(workspace, calls, path):
    text = (workspace / path).read_text().replace("torch", "numpy")
    (workspace / path).write_text(text)
    assert len(dev_env.synchronise(workspace / "env")) == 9
    assert [call[1] for call in calls] == ["cmake", "pytest", "dbuffer"]


def test_an_installation_that_failed_is_tried_again(workspace, calls, monkeypatch):
    def failing(env, *what):
        raise subprocess.CalledProcessError(1, "pip")

    (workspace / "packages/fsdp/src/fsdp/api.py").write_text("x = 1\n")
    monkeypatch.setattr(dev_env, "install", failing)
    with pytest.raises(subprocess.CalledProcessError):
        dev_env.synchronise(workspace / "env")
    monkeypatch.setattr(dev_env, "install", calls.install)
    assert dev_env.synchronise(workspace / "env") == ["fsdp"]


def test_another_interpreter_makes_the_environment_anew(workspace, calls, monkeypatch):
    monkeypatch.setattr(dev_env.sys, "version", "3.99")
    (workspace / "env/bin").mkdir()
    monkeypatch.setattr(dev_env, "run", lambda *command: calls.append(["venv"]))
    assert len(dev_env.synchronise(workspace / "env")) == 9
    assert calls[0] == ["venv"]
