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
    built, tried = [], []
    wheel = tmp_path / "a.whl"
    monkeypatch.setattr(
        check_wheels, "build", lambda project, dist: built.append(project.name) or wheel
    )
    monkeypatch.setattr(
        check_wheels, "try_alone", lambda project, *_: tried.append(project.name) or project.name
    )
    main(["dbuffer"], Options(dist=tmp_path / "dist"))
    assert (sorted(built), tried) == (["dbuffer", "ragged-shard"], ["dbuffer"])
