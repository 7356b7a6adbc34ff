"""Checks that no module has more than 400 lines: ``python -m tools.check_size``."""

import sys
from collections.abc import Iterator
from pathlib import Path

from tools.workspace import NOT_SOURCE, ROOT

MOST = 400
FOLDERS = ("packages", "testkit", "integration", "tools")
SUFFIXES = {".py", ".pyi", ".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh"}
GENERATED = NOT_SOURCE | {"build", "dist"}


def faults(root: Path) -> Iterator[str]:
    """One line of text for each module that is too long."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            inner = path.relative_to(root).parts
            if path.suffix not in SUFFIXES or GENERATED.intersection(inner) or not path.is_file():
                continue
            lines = len(path.read_bytes().splitlines())
            if lines > MOST:
                yield (
                    f"{path.relative_to(root)}:{MOST + 1}: the module has {lines} lines, "
                    f"and {MOST} are the most; split it into modules with one job each"
                )


def main(root: Path = ROOT) -> int:
    """Prints every fault; the exit status."""
    found = list(faults(root))
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
