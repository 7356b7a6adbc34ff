"""Trains a small model by every system on the devices of this machine: losses, times, memory.

    python -m tools.gpu_training --json FILE [--device cuda] [--steps 20]

Each system trains on all devices, at most 8, and is compared with one device of the same kind,
which is compared with the CPU: kernels of another device sum in another order. A rank's part of the
batch is one microbatch. Tensor parallelism is left out on one device. Runs share processes, as
starting them takes longer than training; a peak of memory may include what earlier runs have left.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from integration.compare.run import TrainingJob
from integration.compare.runner import Outcome, run_jobs
from integration.train.config import TrainConfig
from integration.train.metrics import StepRecord, read_metrics, read_summary
from integration.train.stop import StopRequest

# Options by system; "ranks" as a value is their number.
SYSTEMS: dict[str, dict[str, Any]] = {
    "ddp": {"system": "ddp"},
    "fsdp1": {"system": "fsdp1"},
    "fsdp2": {"system": "fsdp2"},
    "fsdp": {"system": "fsdp"},
    "fsdp, 8-bit Adam": {"system": "fsdp", "optimizer": "adam8bit"},
    "fsdp, Muon": {"system": "fsdp", "optimizer": "muon"},
    "fsdp, bf16": {"system": "fsdp", "dtype": "bf16"},
    "plan, FSDP": {"system": "plan", "dp_shard": "ranks"},
    "plan, FSDP, bf16": {"system": "plan", "dp_shard": "ranks", "dtype": "bf16"},
    "plan, FSDP, fp16": {"system": "plan", "dp_shard": "ranks", "dtype": "fp16"},
    "plan, static": {"system": "plan", "dp_replicate": "ranks", "static": True},
    "plan, FSDP, static": {"system": "plan", "dp_shard": "ranks", "static": True},
    "plan, TP and SP": {"system": "plan", "tp": "ranks", "sp": True},
    "plan, TP, static": {"system": "plan", "tp": "ranks", "static": True},
}
# The largest accepted difference of losses; those of 8-bit moments, Muon and mixed precision are
# shown only.
TOLERANCE = 1e-3
NOT_COMPARED = (
    "fsdp, 8-bit Adam", "fsdp, Muon", "fsdp, bf16", "plan, FSDP, bf16", "plan, FSDP, fp16",
)  # fmt: skip
CPU, SINGLE = "the CPU", "one device"
BATCH = 8  # sequences of all ranks in a step


def jobs(device: str, ranks: int, steps: int, model: str, folder: Path) -> dict[str, TrainingJob]:
    """The runs by name. Those of equal devices and ranks share processes, which start once."""

    def job(name: str, device: str, ranks: int, **options: Any) -> TrainingJob:
        values: dict[str, Any] = {
            "out": folder / name.replace(", ", "-").replace(" ", "-"), "model": model,
            "device": device, "ranks": ranks, "steps": steps, "global_batch": BATCH,
            "micro_batch": BATCH if "tp" in options else BATCH // ranks, "resume": "never",
            "tensorboard": False, "final_checkpoint": False,
        }  # fmt: skip
        values |= {key: ranks if value == "ranks" else value for key, value in options.items()}
        config = TrainConfig(**values)
        return TrainingJob(name, config, f"{device} {ranks}")

    first = {CPU: job(CPU, "cpu", 1, system="single"), SINGLE: job(SINGLE, device, 1)}
    ways = {name: way for name, way in SYSTEMS.items() if ranks > 1 or "tp" not in way}
    return first | {name: job(name, device, ranks, **way) for name, way in ways.items()}


def result(outcome: Outcome) -> dict[str, Any]:
    """A run's losses, or its error."""
    job = outcome.job
    if outcome.exit_code != 0:
        log = (outcome.log or job.log).read_text(errors="replace")
        return {"name": job.system, "error": log.strip()[-400:]}
    records = read_metrics(job.folder)
    times = [each.seconds for each in records[job.steps // 2 :]]
    return {"name": job.system, "losses": [each.loss for each in records],
            "ms": 1e3 * statistics.median(times), "mfu": records[-1].mfu,
            "peak": read_summary(job.folder).peak_device_bytes}  # fmt: skip


def row(found: dict[str, Any], ranks: int, reference: dict[str, Any]) -> dict[str, Any]:
    """A row of the table; `reference` is the run that the losses are compared with."""
    cells: dict[str, Any] = {"system": found["name"], "ranks": ranks}
    if "error" in found:
        return cells | {"error": found["error"]}
    cells |= {"last loss": found["losses"][-1], "step, ms": round(found["ms"], 2)}
    if found["peak"]:
        cells["peak of tensors, MB"] = round(max(found["peak"]) / 2**20, 1)
    if found["mfu"] is not None:
        cells["MFU, %"] = round(100 * found["mfu"], 2)
    if "losses" in reference and reference is not found:
        pairs = zip(found["losses"], reference["losses"], strict=True)
        cells[f"largest difference from {reference['name']}"] = max(abs(a - b) for a, b in pairs)
    return cells


class RowWriter:
    """Makes a row of each run when it has ended, and writes all of them to a file.

    Args:
        path: of the file.

    Attributes:
        rows: in the order of the runs' ends.
        failed: whether a run has failed, or differs by more than is accepted.
    """

    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed = False
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}

    def started(self, job: TrainingJob) -> None:
        """Does nothing; see `integration.compare.runner.Watcher`."""

    def progressed(self, job: TrainingJob, record: StepRecord) -> None:
        """Does nothing."""

    def ended(self, outcome: Outcome) -> None:
        """Adds the run's row."""
        name = outcome.job.system
        found = self._found[name] = result(outcome)
        reference = self._found[CPU if name in (CPU, SINGLE) else SINGLE]
        self.rows.append(row(found, outcome.job.ranks, reference))
        print(self.rows[-1], flush=True)
        difference = self.rows[-1].get(f"largest difference from {SINGLE}", 0.0)
        self.failed |= "error" in found or (name not in NOT_COMPARED and difference > TOLERANCE)
        self._path.write_text(json.dumps(self.rows, indent=1) + "\n")


def main() -> int:
    """Trains by every system; 1 if one fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="llama-10m")
    options = parser.parse_args()
    ranks = 2 if options.device == "sim" else min(8, torch.cuda.device_count())
    writer = RowWriter(options.json)
    with tempfile.TemporaryDirectory() as folder:
        runs = jobs(options.device, ranks, options.steps, options.model, Path(folder))
        run_jobs(list(runs.values()), writer, StopRequest())
    return int(writer.failed or len(writer.rows) < len(runs))


if __name__ == "__main__":
    sys.exit(main())
