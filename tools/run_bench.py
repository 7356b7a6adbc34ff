"""Runs benchmarks: ``python -m tools.run_bench [PACKAGE ...] [--OPTION[=VALUE] ...]``.

The contract: ``packages/<package>/benchmarks/run.py --json FILE [--OPTION[=VALUE] ...]`` measures
and writes FILE: a JSON list of flat objects, one a row, whose first key names the case. The rows
land with what they were measured on in ``bench-results/<package>.json`` and in a table.
"""

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tools.workspace import ROOT, packages

RESULTS = ROOT / "bench-results"


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def environment(command: list[str]) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def table(package: str, rows: list[dict[str, Any]]) -> Table:
    """The rows as text: a column for every key, in the order in which keys first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    drawn = Table(*columns, title=package, title_justify="left")
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        drawn.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return drawn


def measure(script: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs one package's benchmarks; their rows."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command: list[str | Path] = [sys.executable, script, "--json", output, *arguments]
        if (status := subprocess.run(command, check=False).returncode) != 0:
            sys.exit(f"{script.relative_to(ROOT)} failed (exit code {status}), see above")
        rows: list[dict[str, Any]] = json.loads(output.read_text())
    return rows


def main(arguments: list[str]) -> int:
    """Runs what is asked for; the exit status."""
    scripts = {p.folder.name: p.folder / "benchmarks" / "run.py" for p in packages()}
    parser = argparse.ArgumentParser(prog="nox -s bench --")
    parser.add_argument("packages", nargs="*", help="default: all that have benchmarks")
    # Not parse_known_args: it takes an option whose value has a space in it for a name.
    passed_on = [text for text in arguments if text.startswith("--") and text != "--help"]
    known = parser.parse_args([text for text in arguments if text not in passed_on])
    if unknown := set(known.packages) - scripts.keys():
        parser.error(f"no package {sorted(unknown)}; there are {sorted(scripts)}")
    for name in known.packages or scripts:
        if not scripts[name].is_file():
            print(f"{name}: no benchmarks yet")
            continue
        rows = measure(scripts[name], passed_on)
        command = ["nox", "-s", "bench", "--", name, *passed_on]
        RESULTS.mkdir(exist_ok=True)
        result = {"package": name, "environment": environment(command), "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        drawn = table(name, rows)
        # As wide as it is, in a narrow terminal too: figures that are cut say nothing.
        Console(width=Console(width=10_000).measure(drawn).maximum).print(drawn)
        print(f"written: bench-results/{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
