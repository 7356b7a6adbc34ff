"""What `nox -s bench -- ragged-shard` runs: the planner's speed, and the placements'."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import placements_speed
import planner_speed

PARTS = {
    "planner": lambda: [asdict(row) for row in planner_speed.rows()],
    "dispatch": placements_speed.dispatch_rows,
    "redistribution": placements_speed.redistribution_rows,
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
