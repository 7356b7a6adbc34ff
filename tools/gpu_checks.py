"""Everything that is checked and measured on a device: ``python -m tools.gpu_checks --out DIR``.

``tools/gpu.sh`` installs the packages and runs it. Each part is a command of its own with a time
limit, and all of them together have one; a part that fails or takes too long does not stop the
others. Writes DIR/gpu.json and a page,
DIR/gpu.md. ``--device sim`` runs the same parts on testkit's simulated device, with small models,
so that the script itself is tested where there is no GPU; CUDA's own parts are left out, by name.
Exit status: 0 if every part has passed.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from tools.run_bench import environment
from tools.workspace import ROOT

Rows = list[dict[str, Any]]

# Between SIGTERM and SIGKILL of a part that takes too long.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: title of its table.
        command: arguments of Python; ``{out}`` is the file that it writes.
        seconds: its time limit.
        read: gives rows of the file that it wrote.
        sim: arguments that replace ``command`` on the simulated device; None: it needs CUDA.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    read: Callable[[Path], Rows]
    sim: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """What a part gave.

    Attributes:
        state: "passed", "failed", "too slow", or "needs CUDA".
        seconds: that it took.
        rows: of its table; those written before a failure, too.
        output: the end of what it printed, if it has not passed.
    """

    name: str
    command: str
    state: str
    seconds: float = 0.0
    rows: Rows = field(default_factory=list)
    output: str = ""


def read_json(path: Path) -> Rows:
    """The rows of a benchmark."""
    rows: Rows = json.loads(path.read_text())
    return rows


def read_tests(path: Path) -> Rows:
    """A row for each test file of pytest's report, and one for each failure."""
    counts: dict[str, dict[str, Any]] = {}
    failures: Rows = []
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("classname", "")
        row = counts.setdefault(name, {"file": name, "passed": 0, "skipped": 0, "failed": 0})
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "passed"
        row["skipped" if "skipped" in kinds else state] += 1
        if state == "failed":
            problem = next(child for child in case if child.tag in ("failure", "error"))
            text = problem.get("message", "").splitlines() or [""]
            failures.append({"file": f"{name}: {case.get('name')}", "error": text[0][:200]})
    return [*counts.values(), *failures]


SCRIPTS = "packages/{}/benchmarks/{}"
# These files alone: others import what a machine with a GPU need not have.
CUDA_TESTS = tuple(
    sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests/**/test_cuda*.py"))
)
PARTS = (
    Part(
        "Tests on CUDA",
        ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "--junitxml={out}",
         *CUDA_TESTS),
        240,
        read_tests,
    ),
    Part(
        "Training by every system",
        ("-m", "tools.gpu_training", "--device=cuda", "--json={out}"),
        180,
        read_json,
        ("-m", "tools.gpu_training", "--device=sim", "--steps=2", "--model=llama-tiny",
         "--json={out}"),
    ),
    Part(
        "fsdp and FSDP2",
        (SCRIPTS.format("fsdp", "run.py"), "--device=cuda", "--models=LLaMA 6 M,LLaMA 220 M",
         "--ways=alone,fsdp (native)", "--rounds=1", "--length=512", "--json={out}"),
        150,
        read_json,
        (SCRIPTS.format("fsdp", "run.py"), "--device=sim", "--models=LLaMA 6 M",
         "--ways=fsdp (native)", "--rounds=1", "--length=8", "--json={out}"),
    ),
    Part(
        "Dispatch of DTensor",
        (SCRIPTS.format("dtensor-rules", "run.py"), "--only=ops", "--device=cuda", "--json={out}"),
        120,
        read_json,
        (SCRIPTS.format("dtensor-rules", "run.py"), "--only=ops", "--device=sim", "--rounds=2",
         "--json={out}"),
    ),
    Part(
        "Random numbers, in bandwidth",
        (SCRIPTS.format("dist-rng", "cuda_fills.py"), "--json={out}"),
        120,
        read_json,
    ),
)  # fmt: skip


def short_name(part: Part) -> str:
    """Names its files, and the part for ``--parts``."""
    return part.name.split()[0].lower()


def run(part: Part, device: str, folder: Path, log: Path) -> Outcome:
    """Runs a part on a device and reads what it wrote."""
    command = part.command if device == "cuda" else part.sim
    if command is None:
        return Outcome(part.name, "", "needs CUDA")
    out = folder / f"{short_name(part)}-part"
    words = [word.format(out=out) for word in command]
    shown = " ".join(["python", *words])
    print(f"{part.name}: {shown}", flush=True)
    start, state = time.monotonic(), "passed"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if process.wait(part.seconds) != 0:
                state = "failed"
        except subprocess.TimeoutExpired:
            state = "too slow"
            _end(process)
    seconds = time.monotonic() - start
    rows: Rows = []
    if out.exists():
        rows = part.read(out)
        out.unlink()
    text = "" if state == "passed" else log.read_text(errors="replace")[-3000:]
    print(f"{part.name}: {state} in {seconds:.0f} s", flush=True)
    return Outcome(part.name, shown, state, seconds, rows, text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part and the processes that it has started, which would disturb the next part."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    process.kill()
    process.wait()
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def page(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    """The outcomes as Markdown."""
    lines = [
        f"# {facts['device name']}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}, {facts['devices']} device(s);"
        f" {facts['date']}, `{facts['command']}`.",
        "",
        "| part | result | seconds |",
        "|---|---|---|",
        *(f"| {each.name} | {each.state} | {each.seconds:.0f} |" for each in outcomes),
    ]
    for each in outcomes:
        lines += ["", f"## {each.name}", ""]
        if each.command:
            lines += [f"`{each.command}`", ""]
        lines += _table(each.rows)
        if each.output:
            lines += ["", "```text", each.output, "```"]
    return "\n".join(lines) + "\n"


def _table(rows: Rows) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["No rows."]
    body = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body)]


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def summary(outcomes: list[Outcome]) -> str:
    """The numbers of parts by their state, such as "3 passed, 2 needs CUDA"."""
    states = Counter(each.state for each in outcomes)
    return ", ".join(f"{number} {state}" for state, number in states.items())


def main() -> int:
    """Runs every part; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit of all parts")
    known = [short_name(part) for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=known, default=known, help="these alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "tools.gpu_checks", f"--device={options.device}"]
    facts = environment(command) | {"device name": "Simulated device", "devices": 2}
    if options.device == "cuda":
        facts |= {
            "device name": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
        }
    outcomes = []
    deadline = time.monotonic() + options.seconds
    for part in (part for part in PARTS if short_name(part) in options.parts):
        log = options.out / f"{short_name(part)}.log"
        limit = min(part.seconds, max(1.0, deadline - time.monotonic()))
        outcomes.append(run(replace(part, seconds=limit), options.device, options.out, log))
        # After each part, so that a killed run leaves what it has.
        values = facts | {"parts": [asdict(each) for each in outcomes]}
        (options.out / "gpu.json").write_text(json.dumps(values, indent=1) + "\n")
        (options.out / "gpu.md").write_text(page(facts, outcomes))
    print(f"{summary(outcomes)}: {options.out / 'gpu.md'}", flush=True)
    return int(any(each.state in ("failed", "too slow") for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
