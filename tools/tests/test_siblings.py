"""siblings.txt tells pip where each package of the clone is: one command installs any of them."""

import json
import os
import subprocess
import sys

import pytest

from tools.workspace import ROOT, packages

BY_NAME = {package.name: package for package in packages()}


def test_every_package_is_listed_at_its_folder():
    lines = (ROOT / "siblings.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == [
        f"{package.name} @ file://${{PWD}}/packages/{package.folder.name}" for package in packages()
    ]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("plan-api[ragged]", {"plan-api", "ragged-shard"}),
        ("fsdp[rules,rng]", set(BY_NAME) - {"plan-api"}),
    ],
)
def test_pip_finds_what_a_package_and_its_extras_need(wanted, found, tmp_path):
    report = tmp_path / "report.json"
    subprocess.run(  # metadata alone: nothing is compiled, and no index asked
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-index"),
            *("--no-build-isolation", "--disable-pip-version-check", "-c", "siblings.txt"),
            *("--report", report, f"./packages/{wanted}"),
        ],
        cwd=ROOT,
        env=os.environ | {"PWD": str(ROOT)},
        check=True,
    )
    installed = json.loads(report.read_text())["install"]
    urls = {each["metadata"]["name"]: each["download_info"]["url"] for each in installed}
    assert urls == {name: BY_NAME[name].folder.as_uri() for name in found}
