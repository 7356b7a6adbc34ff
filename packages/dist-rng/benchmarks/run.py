"""Runs the benchmarks of `nox -s bench -- dist-rng`: CPU fills, and CUDA fills on a device.

python packages/dist-rng/benchmarks/run.py [--only OP] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import cpu_fills
import cuda_fills

from dist_rng import cuda


def main() -> None:
    parser = argparse.ArgumentParser(description="Fills of dist-rng against torch's.")
    names = dict.fromkeys(op.name for op in (*cpu_fills.OPS, *cuda_fills.OPS))
    parser.add_argument("--only", choices=list(names), help="one op")
    parser.add_argument(
        "--numel", type=int, default=cpu_fills.NUMEL, help="elements of the CPU's global tensor"
    )
    parser.add_argument(
        "--cuda-numel",
        type=int,
        default=cuda_fills.NUMEL,
        help="elements of the GPU's local tensor",
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    measured = cpu_fills.report(options.numel, options.only)
    if cuda.available():
        measured += cuda_fills.report(options.cuda_numel, options.only)
    else:
        print(f"cuda_fills.py did not run: {cuda_fills.REQUIREMENT}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
