"""What a report says of the checkout, the machine and the commands."""

import shlex
import subprocess

import pytest

from integration.report.environment import (
    cpu_model,
    describe_environment,
    git_commit,
    shell_lines,
)


def git(folder, *arguments):
    command = ["git", "-C", folder, "-c", "user.name=me", "-c", "user.email=me@here", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """Somebody's checkout with one commit, and its name."""
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "another project")
    return tmp_path, git(tmp_path, "rev-parse", "HEAD")


def test_outside_of_a_checkout_there_is_no_commit(tmp_path):
    assert git_commit(tmp_path) is None
    assert git_commit(tmp_path / "absent") is None


def test_the_commit_of_another_projects_checkout_is_not_returned(checkout):
    folder, _ = checkout
    assert git_commit(folder) is None


def test_the_commit_of_this_checkout_names_uncommitted_changes(checkout):
    folder, commit = checkout
    package = folder / "integration" / "src" / "integration"
    package.mkdir(parents=True)
    assert git_commit(package) == commit
    (package / "new.py").touch()
    assert git_commit(package) == f"{commit} with uncommitted changes"


def test_a_machine_without_cpuinfo_still_has_a_name(tmp_path):
    assert cpu_model(tmp_path / "cpuinfo").startswith("unknown (")


def test_commands_break_before_options_and_mean_the_same():
    words = ["python", "-m", "x", *("--option", "a value") * 20, "--last"]
    text = shell_lines(words)
    assert shlex.split(text.replace("\\\n", "")) == words
    lines = text.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 96
    assert all(line.lstrip().startswith("--") for line in lines[1:])


def test_the_environment_names_what_decides_a_result():
    found = describe_environment(("python", "-m", "x", "--data", "my text"), threads=2, data="some")
    facts = dict(found.facts())
    assert facts["command"] == "python -m x --data 'my text'"
    assert (facts["threads per rank"], facts["data"]) == ("2", "some")
    for label in ("date", "git commit", "torch", "transformers", "dist-rng", "Python", "CPU"):
        assert facts[label]
