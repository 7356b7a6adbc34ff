import json

import pytest

from tools import run_bench
from tools import workspace as tools_workspace

SCRIPT = """
import json, sys
_, _, output, *options = sys.argv
rows = [{"case": "add", "ratio": 0.123456}, {"case": str(options), "bytes": 4}]
with open(output, "w") as file:
    json.dump(rows, file)
"""


@pytest.fixture
def bench(workspace, monkeypatch):
    (workspace / "packages/fsdp/benchmarks").mkdir()
    (workspace / "packages/fsdp/benchmarks/run.py").write_text(SCRIPT)
    monkeypatch.setattr(run_bench, "RESULTS", workspace / "bench-results")
    monkeypatch.setattr(run_bench, "packages", lambda: tools_workspace.packages(workspace))
    return run_bench.main


def test_rows_are_written_with_what_they_were_measured_on_and_printed(bench, workspace, capfd):
    assert bench(["fsdp", "--only=normal f32", "--quick"]) == 0
    result = json.loads((workspace / "bench-results/fsdp.json").read_text())
    assert result["rows"][1] == {"case": "['--only=normal f32', '--quick']", "bytes": 4}
    assert result["environment"]["command"] == "nox -s bench -- fsdp '--only=normal f32' --quick"
    assert {"date", "torch", "python", "cpu"} <= result["environment"].keys()
    printed = capfd.readouterr().out
    assert "0.1235" in printed
    assert "bytes" in printed


def test_a_wide_table_is_not_cut(bench, workspace, capfd):
    row = {"case": "a case with a long name"} | {f"microseconds_{i}": 0.123456 for i in range(12)}
    write = f"import json, sys; json.dump([{row}], open(sys.argv[2], 'w'))"
    (workspace / "packages/fsdp/benchmarks/run.py").write_text(write)
    assert bench(["fsdp"]) == 0
    printed = capfd.readouterr().out
    assert printed.count("0.1235") == 12
    assert "a case with a long name" in printed
    assert "microseconds_11" in printed


def test_a_package_without_benchmarks_is_said_so(bench, workspace, capfd):
    assert bench([]) == 0
    assert "dbuffer: no benchmarks yet" in capfd.readouterr().out
    assert [path.name for path in (workspace / "bench-results").iterdir()] == ["fsdp.json"]


def test_an_unknown_package_is_refused(bench, capfd):
    with pytest.raises(SystemExit, match="2"):
        bench(["nothing"])
    assert "no package ['nothing']" in capfd.readouterr().err


def test_a_benchmark_that_fails_is_named_without_a_traceback(bench, workspace, monkeypatch):
    monkeypatch.setattr(run_bench, "ROOT", workspace)
    (workspace / "packages/fsdp/benchmarks/run.py").write_text("raise SystemExit(2)")
    with pytest.raises(SystemExit, match=r"fsdp/benchmarks/run\.py failed \(exit code 2\)"):
        bench(["fsdp"])
    assert not (workspace / "bench-results").exists()
