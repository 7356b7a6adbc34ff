"""A local index of distributions, from which pip installs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.local_index import in_order, repair, write_index
from tools.workspace import needed, packages

METADATA = "Metadata-Version: 2.1\nName: tiny-one\nVersion: 0.1.0\n"


def wheel(folder, name="tiny_one-0.1.0-py3-none-any.whl"):
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_one.py", "VALUE = 7\n")
        archive.writestr("tiny_one-0.1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "tiny_one-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_one-0.1.0.dist-info/RECORD", "")
    return path


def test_a_package_is_built_after_those_that_it_needs():
    ordered = [each.name for each in in_order(packages())]
    by_name = {project.name: project for project in packages()}
    assert sorted(ordered) == sorted(by_name)
    for place, name in enumerate(ordered):
        assert needed(name, by_name) <= set(ordered[: place + 1])


def test_pip_installs_from_the_index_and_checks_its_hashes(tmp_path):
    index = tmp_path / "index"
    write_index([wheel(tmp_path)], index)

    def install(target):
        command = [sys.executable, "-m", "pip", "--isolated", "install", "-q", "--no-cache-dir",
                   "--index-url", index.as_uri(), "--target", str(target), "tiny-one"]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True)

    done = install(tmp_path / "there")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "tiny_one.py").read_text() == "VALUE = 7\n"
    with (index / "tiny-one" / "tiny_one-0.1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"more")
    assert "HASH" in install(tmp_path / "again").stderr.upper()


def test_an_index_has_nothing_of_an_earlier_one(tmp_path):
    index = tmp_path / "index"
    (index / "old").mkdir(parents=True)
    write_index([wheel(tmp_path)], index)
    assert sorted(path.name for path in index.iterdir()) == ["index.html", "tiny-one"]


def test_a_pure_wheel_needs_no_repair(tmp_path):
    made = wheel(tmp_path)
    assert repair(made, tmp_path / "no-python") == made


def test_a_wheel_that_auditwheel_refuses_ends_the_build(tmp_path):
    made = wheel(tmp_path, "tiny_one-0.1.0-cp311-cp311-linux_x86_64.whl")
    with pytest.raises(SystemExit, match="auditwheel failed"):
        repair(made, Path(sys.executable))  # which has no auditwheel
    assert made.exists()
