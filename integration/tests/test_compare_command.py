"""The comparison as a user runs it, with the real trainer."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of DDP with the single device, and where its results lie."""
    out = tmp_path_factory.mktemp("comparison") / "results"
    options = ["--systems", "ddp", "--model", "llama-tiny", "--steps", str(STEPS)]
    command = [sys.executable, "-m", "integration.compare", *options, "--out", str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_it_passes_and_says_so(finished):
    out, result = finished
    assert result.returncode == 0, result.stderr
    assert "passes: " in result.stdout
    assert f"report: {out / 'report.html'}" in result.stdout
    assert "single: 1 rank, 6 steps" in result.stderr


def test_every_file_is_there(finished):
    out, _ = finished
    for name in ("report.md", "report.html", "results.json", "figures/losses.png"):
        assert (out / name).stat().st_size > 0
    for name in ("single", "ddp"):
        assert (out / "runs" / f"{name}.log").exists()


def test_the_results_hold_every_step_of_both_systems(finished):
    out, _ = finished
    results = json.loads((out / "results.json").read_text())
    single, ddp = results["systems"]
    assert results["passes"]
    assert [record["step"] for record in ddp["records"]] == list(range(1, STEPS + 1))
    assert single["records"][-1]["loss"] < single["records"][0]["loss"]
    assert ddp["deviation"]["maximum"] <= ddp["tolerance"] == 1e-4
    assert (ddp["ranks"], ddp["summary"]["data_parallel_degree"]) == (2, 2)
    assert len(ddp["summary"]["peak_rss_bytes"]) == 2
