"""What checksums add to a save: ``run.py --json FILE [--megabytes N] [--rounds N]``.

One rank saves a state of plain tensors by DCP, in turn by torch's writer and by the trainer's,
which has checksums and leaves torch's CRC32 out, beside FILE. Rows have the median seconds of each
on the clock and of the processor, and the median over rounds of their ratios to torch's writer.
Files are synced, as a checkpoint's are, so seconds on the clock depend on the disk.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from integration.train.checkpoint.writer import CheckpointWriter
from integration.train.launch.world import process_group


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    parts = options.megabytes // 4
    state = {str(part): torch.randn(1_000_000) for part in range(parts)}  # 4 MB each
    writers = {"without": dcp.FileSystemWriter, "with checksums": CheckpointWriter}
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    processor: dict[str, list[float]] = {name: [] for name in writers}
    with process_group(600), tempfile.TemporaryDirectory(dir=options.json.resolve().parent) as out:
        for _ in range(options.rounds + 1):  # the first is for warming up
            for name, writer in writers.items():
                started, computed = time.perf_counter(), time.process_time()
                dcp.save(state, storage_writer=writer(Path(out) / "state"))
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - computed)
    rows = [
        {
            "case": name,
            "megabytes": 4 * parts,
            "seconds": statistics.median(seconds[name][1:]),
            "processor_seconds": statistics.median(processor[name][1:]),
            "ratio": _ratio(seconds[name], seconds["without"]),
            "processor_ratio": _ratio(processor[name], processor["without"]),
        }
        for name in writers
    ]
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


def _ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times[1:], base[1:], strict=True))


if __name__ == "__main__":
    main()
