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
    options = parser.parse_args()
    parts = [options.only] if options.only else list(PARTS)
    rows = [row for part in parts for row in PARTS[part]()]
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
