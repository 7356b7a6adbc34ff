"""Runs an example twice, with its framework's own FSDP2 and with fsdp, and compares the two.

An example calls `main` with a function that trains for some steps and returns the losses. Started
by hand, the script starts ranks of itself by torchrun, once for each system; a rank calls the
function and writes what it measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SYSTEMS = ("native", "fsdp")


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Attributes:
        losses: of the steps.
        seconds: that training took on the slowest rank, without imports.
        mib: growth of peak resident memory by training, of the rank with the most.
    """

    losses: Sequence[float]
    seconds: float
    mib: float


def main(train: Callable[[str, int], Sequence[float]], *, tolerance: float = 1e-5) -> None:
    """Compares training with ``"native"`` and with ``"fsdp"``; exits with 1 if losses differ.

    Args:
        train: called on each rank with the system and the number of steps; returns the losses.
        tolerance: largest difference of a loss.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="where to write the comparison")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.system is not None:
        _run_rank(train, options)
        return
    runs = {system: _start(system, options) for system in SYSTEMS}
    for system, run in runs.items():
        losses = " ".join(f"{loss:.6f}" for loss in run.losses)
        print(f"{system:>8}: losses {losses}; {run.seconds:.1f} s; {run.mib:.0f} MiB a rank")
    native, own = (runs[system].losses for system in SYSTEMS)
    difference = max(abs(one - other) for one, other in zip(native, own, strict=True))
    print(f"largest difference of a loss: {difference:.1e}")
    if options.json is not None:
        found = {system: asdict(run) for system, run in runs.items()}
        options.json.write_text(json.dumps(found | {"difference": difference}, indent=1) + "\n")
    if difference > tolerance or len(own) != options.steps:
        sys.exit(f"error: expected {options.steps} losses within {tolerance:g} of native FSDP2's")


def _start(system: str, options: argparse.Namespace) -> Run:
    """Starts ranks of this script; returns what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.ranks), sys.argv[0], "--system", system]
        command += ["--steps", str(options.steps), "--json", str(Path(folder) / "run")]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        subprocess.run(command, check=True, env=environment)
        runs = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    return Run(
        runs[0]["losses"],
        max(run["seconds"] for run in runs),
        max(run["mib"] for run in runs),
    )


def _run_rank(train: Callable[[str, int], Sequence[float]], options: argparse.Namespace) -> None:
    before, started = _peak_mib(), time.perf_counter()
    losses = [float(loss) for loss in train(options.system, options.steps)]
    run = Run(losses, time.perf_counter() - started, _peak_mib() - before)
    file: Path = options.json
    file.with_name(f"{file.name}-{os.environ['RANK']}").write_text(json.dumps(asdict(run)))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
