"""What `nox -s bench -- dtensor-rules` runs: operators, redistributions, steps, and more."""

import argparse
import json
from pathlib import Path

import ablation
import cold_speed
import gather_speed
import lengths_speed
import ops_speed
import plain_speed
import redistribute_speed
import results_speed
import step_speed

from testkit import sim

PARTS = {
    "ops": ops_speed.rows,
    "redistribute": redistribute_speed.rows,
    "step": step_speed.rows,
    "ablation": ablation.rows,
    "lengths": lengths_speed.rows,
    "results": results_speed.rows,
    "plain": plain_speed.rows,
    "gathers": gather_speed.rows,
    "cold": cold_speed.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--only", choices=PARTS, help="one part; by default all")
    ops = parser.add_argument_group("of --only=ops")
    ops.add_argument("--device", default="cpu", help="of the operands: cpu, cuda, or sim")
    ops.add_argument("--rounds", type=int, default=ops_speed.ROUNDS)
    options = parser.parse_args()
    chosen = {"device": options.device, "rounds": options.rounds}
    if chosen != {"device": "cpu", "rounds": ops_speed.ROUNDS} and options.only != "ops":
        parser.error(f"--device and --rounds: expected --only=ops, got {options.only}")
    if options.device == "sim":
        sim.load()
    parts = [options.only] if options.only else list(PARTS)
    how = chosen if options.only == "ops" else {}
    rows = [row for part in parts for row in PARTS[part](**how)]
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
