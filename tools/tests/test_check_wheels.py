import subprocess

import pytest

from tools import check_wheels
from tools.check_wheels import Options, clean_environment, main, torch_alone


def test_an_environment_sees_its_own_packages_and_then_the_shared_ones(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "found_there.py").write_text("")
    python = clean_environment(tmp_path / "env", shared)
    for name, code in {"found_there": 0, "pytest": 1}.items():
        assert (
            subprocess.run([python, "-c", f"import {name}"], stderr=subprocess.DEVNULL).returncode
            == code
        )
    command = [python, "-c", "import sys; print(*sys.path, sep='\\n')"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    assert path.index(str(own)) < path.index(str(shared))


def test_torch_is_seen_with_what_it_needs_and_nothing_else_of_this_environment(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shared = tmp_path / "shared"
    shared.mkdir()
    python = clean_environment(tmp_path / "env", torch_alone(shared))
    seen = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    ).stdout
    names = {line.partition("==")[0].lower() for line in seen.splitlines()}
    assert {"torch", "sympy", "mpmath", "markupsafe", "pip"} <= names
    assert not names & {"pytest", "transformers", "fsdp", "testkit", "pybind11"}
    subprocess.run([python, "-m", "pip", "check"], check=True)
    script = "import torch; print(torch.__file__, torch.ones(2).sum().item())"
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(shared / "torch" / "__init__.py"), "2.0"]


def test_an_unknown_package_is_an_error_before_anything_is_built(tmp_path):
    folder = tmp_path / "folder"
    folder.write_text("")
    with pytest.raises(SystemExit, match=r"no package \['nope'\]; there are \['dbuffer'"):
        main(["nope"], Options(dist=tmp_path))
    assert folder.exists()


def test_what_a_package_needs_is_built_and_only_what_is_named_is_tried(tmp_path, monkeypatch):
    tried = []

    def unchanged_wheel(project):
        folder = tmp_path / "wheels" / project.name
        folder.mkdir(parents=True)
        name = f"{project.name.replace('-', '_')}-0.1.0"
        for file in (f"{name}-py3-none-any.whl", f"{name}.tar.gz"):
            (folder / file).write_text(project.name)
        return folder / f"{name}-py3-none-any.whl"

    def try_alone(project, wheels, *_):
        tried.append(project.name)
        return wheels[project.name].read_text()

    monkeypatch.setattr(check_wheels, "unchanged_wheel", unchanged_wheel)
    monkeypatch.setattr(check_wheels, "try_alone", try_alone)
    monkeypatch.setattr(check_wheels, "torch_alone", lambda folder: folder)
    main(["dbuffer"], Options(dist=tmp_path / "dist"))
    assert tried == ["dbuffer"]
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == [
        *("dbuffer-0.1.0-py3-none-any.whl", "dbuffer-0.1.0.tar.gz"),
        *("ragged_shard-0.1.0-py3-none-any.whl", "ragged_shard-0.1.0.tar.gz"),
    ]
