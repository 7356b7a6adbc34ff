"""Trains a small model by every system on the devices of this machine: losses, times, memory.

    python -m tools.gpu_training --json FILE [--device cuda] [--steps 20]

Each system trains on all devices, at most 8, and is compared with one device of the same kind,
which is compared with the CPU: kernels of another device sum in another order.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tools.workspace import ROOT

# Options by system, for any number of ranks; "{ranks}" is their number.
SYSTEMS = {
    "ddp": ("--system", "ddp"),
    "fsdp1": ("--system", "fsdp1"),
    "fsdp2": ("--system", "fsdp2"),
    "fsdp": ("--system", "fsdp"),
    "fsdp, 8-bit Adam": ("--system", "fsdp", "--optimizer", "adam8bit"),
    "fsdp, Muon": ("--system", "fsdp", "--optimizer", "muon"),
    "fsdp, bf16": ("--system", "fsdp", "--dtype", "bf16"),
    "plan, FSDP": ("--system", "plan", "--dp-shard", "{ranks}"),
    "plan, TP and SP": ("--system", "plan", "--tp", "{ranks}", "--sp"),
    "plan, TP, static": ("--system", "plan", "--tp", "{ranks}", "--static"),
}
# By name, the largest accepted difference of losses; 8-bit moments, Muon and bf16 are shown only.
TOLERANCE = 1e-3
NOT_COMPARED = ("fsdp, 8-bit Adam", "fsdp, Muon", "fsdp, bf16")


def train(
    name: str, options: tuple[str, ...], device: str, ranks: int, steps: int, model: str
) -> dict[str, Any]:
    """One run; its losses, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "integration.train", "--out", folder, "--device", device,
            "--model", model, "--micro-batch", "1", "--steps", str(steps), "--no-tensorboard",
            "--no-final-checkpoint", "--ranks", str(ranks),
            *(word.format(ranks=ranks) for word in options),
        ]  # fmt: skip
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ
        )
        if ended.returncode != 0:
            return {"name": name, "error": (ended.stderr or ended.stdout).strip()[-400:]}
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((Path(folder) / "summary.json").read_text())
    records = [json.loads(line) for line in lines]
    return {"name": name, "losses": [each["loss"] for each in records],
            "ms": 1e3 * statistics.median(each["seconds"] for each in records[steps // 2 :]),
            "peak": summary["peak_device_bytes"], "mfu": records[-1]["mfu"]}  # fmt: skip


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


def main() -> int:
    """Trains by every system; 1 if one fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="llama-10m")
    options = parser.parse_args()
    ranks = 2 if options.device == "sim" else min(8, torch.cuda.device_count())
    how = (options.steps, options.model)
    one = ("--system", "single")
    cpu = train("the CPU", one, "cpu", 1, *how)
    single = train("one device", one, options.device, 1, *how)
    rows = [row(cpu, 1, cpu), row(single, 1, cpu)]
    failed = "error" in cpu or "error" in single
    for name, words in SYSTEMS.items():
        found = train(name, words, options.device, ranks, *how)
        rows.append(row(found, ranks, single))
        print(rows[-1], flush=True)
        difference = rows[-1].get("largest difference from one device", 0.0)
        failed |= "error" in found or (name not in NOT_COMPARED and difference > TOLERANCE)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
