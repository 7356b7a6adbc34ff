import subprocess
import sysconfig

import pytest

from tools import check_wheels
from tools.check_wheels import Options, clean_environment, main

SEES_PYTEST = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pytest') is None)"


@pytest.mark.parametrize("stacked", [False, True])
def test_only_a_stacked_environment_sees_the_present_one(stacked, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = clean_environment(tmp_path / "env", Options(stacked=stacked))
    assert (subprocess.run([python, "-c", SEES_PYTEST]).returncode == 0) == stacked
    command = [python, "-c", "import sys; print(*sys.path, sep='\\n')"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    if stacked:  # its own packages come first
        assert path.index(str(own)) < path.index(sysconfig.get_path("purelib"))


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
    main(["dbuffer"], Options(dist=tmp_path / "dist"))
    assert tried == ["dbuffer"]
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == [
        *("dbuffer-0.1.0-py3-none-any.whl", "dbuffer-0.1.0.tar.gz"),
        *("ragged_shard-0.1.0-py3-none-any.whl", "ragged_shard-0.1.0.tar.gz"),
    ]
